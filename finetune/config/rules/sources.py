"""Rules of row sources: one origin, at a supported address; the limits of streams; and how files of rows are read."""

import codecs
from collections import Counter
from collections.abc import Iterator, Sequence

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.paths import is_path, is_url
from finetune.config.run_config import RunConfig
from finetune.config.section import KINDS_OF_KEYS, KINDS_WITH_POSITIONS, TABLE_KINDS, TEXT_KINDS
from finetune.config.sections.data import SourceSection, TrainedSourceSection, ValidationSourceSection
from finetune.errors import Problem
from finetune.runtime.text.redact import without_query

SPLIT_KEYS = ("fraction", "hash_fraction")
"""Ways to split validation rows off the training rows."""

SCHEMES = ("s3", "gs", "gcs", "abfs", "az", "hf", "https", "http", "file", "memory")
"""Storage that rows are read from."""


def source_sections(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Yield each section that describes rows, with its dotted key."""
    train, validation = config.data.train, config.data.validation
    yield from ((f"data.train.mix.{number}", source) for number, source in enumerate(train.mix))
    if not train.mix:
        yield "data.train", train
    if validation is not None:
        yield "data.validation", validation


def row_sources(config: RunConfig) -> Iterator[tuple[str, SourceSection]]:
    """Yield each section with rows of its own, with its dotted key."""
    for key, source in source_sections(config):
        if not is_split_of_training_rows(source):
            yield key, source


def is_split_of_training_rows(source: SourceSection) -> bool:
    """Return whether the source is a split of the training rows."""
    return isinstance(source, ValidationSourceSection) and any(getattr(source, name) is not None for name in SPLIT_KEYS)


def source_has_an_address(config: RunConfig) -> Iterator[Problem]:
    """Each source has an origin: files, storage that is supported, without a secret in its URL, or a hub dataset."""
    more = {
        "data.train": ", or `mix` (several of these)",
        "data.validation": ", or split the training rows (`fraction` or `hash_fraction`)",
    }
    for key, source in row_sources(config):
        if source.path is None and source.name is None and source.source is None:
            message = f"no rows are given. Write `path` (files) or `name` (a hub dataset){more.get(key, '')}."
            yield Problem(key, message)
    for key, source in row_sources(config):
        if source.name is not None and is_path(source.name):
            yield Problem(f"{key}.name", f"`{source.name}` is a path, not a hub dataset. Write it as `path`.")
        if source.path is not None and is_url(source.path):
            yield from storage_problems(f"{key}.path", source.path, schemes=SCHEMES)


def storage_problems(key: str, url: str, *, schemes: Sequence[str]) -> Iterator[Problem]:
    """Yield why the URL is not one of this storage, or contains a secret; the last of `schemes` is for tests."""
    scheme, _, rest = url.partition("://")
    if scheme not in schemes:
        hint = did_you_mean(scheme, schemes) or f"Supported: {format_list(schemes[:-1])}."
        yield Problem(key, f"the storage `{scheme}://` is not supported. {hint}")
    elif "@" in rest.partition("/")[0]:
        yield Problem(key, "secrets do not belong in a job file. Use the storage's environment variables.")


def stream_sources(config: RunConfig) -> Iterator[tuple[str, TrainedSourceSection]]:
    """Yield each source that is streamed with its dotted key."""
    train = config.data.train
    for number, source in enumerate(train.mix):
        if source.stream is not None:
            yield f"data.train.mix.{number}", source
    if train.stream is not None and not train.mix:
        yield "data.train", train


def streams_fit(config: RunConfig) -> Iterator[Problem]:
    """A stream is read in steps, as a whole, in windows that hold what is sorted or trained on at once."""
    for key, source in stream_sources(config):
        if source.name is not None and "[" in source.split:
            whole = source.split.partition("[")[0]
            message = f"a slice cannot be streamed. Write `{whole}`, and use `skip` and `take` to select rows."
            yield Problem(f"{key}.split", message)
    for key, _ in stream_sources(config):
        for name in ("epochs", "tokens"):
            if getattr(config.train, name) is not None:
                message = f"the length of the stream `{key}` is unknown. Use `train.steps`."
                yield Problem(f"train.{name}", message)
    validation = config.data.validation
    for key, _ in stream_sources(config):
        for name in SPLIT_KEYS:
            if validation is not None and getattr(validation, name) is not None:
                message = (
                    f"splitting it off would read the whole stream `{key}` first. Give a `path` of validation rows."
                )
                yield Problem(f"data.validation.{name}", message)
    steps, batch = max(1, config.data.batching.num_sorted_steps), config.train.global_batch_size
    for key, source in stream_sources(config):
        assert source.stream is not None
        if source.stream.window_rows < steps * batch:
            what = (
                f"{steps} steps of {batch}, sorted by length together, need"
                if steps > 1
                else f"a step of {batch} needs"
            )
            message = f"{source.stream.window_rows:,} rows are fewer than {what}. Write at least {steps * batch:,}."
            yield Problem(f"{key}.stream.window_rows", message)


_ENCODINGS = ("utf-8", "utf-16", "utf-16-le", "utf-16-be", "latin-1", "cp1252", "shift_jis", "gb18030", "big5")
"""Common ones, for the hint."""


def text_can_be_read(config: RunConfig) -> Iterator[Problem]:
    """Python can read text with the encoding, and no delimiter can be taken for the end of a line or a quotation."""
    for key, source in row_sources(config):
        if source.delimiter in ("\n", "\r", '"', "\0"):
            message = 'a line break, a quotation mark or a NUL cannot separate columns. Write `";"`, `"|"` or `"\\t"`.'
            yield Problem(f"{key}.delimiter", message)
        if source.encoding is None:
            continue
        try:
            "".encode(source.encoding)  # refuses codecs that are not of texts
            is_known = codecs.lookup(source.encoding).incrementaldecoder is not None
        except (LookupError, ValueError):  # ValueError: an embedded zero, for one
            is_known = False
        if not is_known:
            hint = (
                did_you_mean(source.encoding, _ENCODINGS) or f"Write one such as {format_list(_ENCODINGS, last='or')}."
            )
            yield Problem(f"{key}.encoding", f"the encoding `{source.encoding}` does not exist. {hint}")


def positions_have_names(config: RunConfig) -> Iterator[Problem]:
    """A position maps to a name of its own that no other position can have."""
    for key, source in row_sources(config):
        named = {name: yours for name, yours in source.columns.items() if name.isdecimal()}
        for name, yours in named.items():
            if not isinstance(yours, str) or yours.isdecimal() or not yours:
                message = "a position maps to a name that begins with a letter: `{0: label}`."
                yield Problem(f"{key}.columns.{name}", message)
            elif name != str(int(name)):
                yield Problem(f"{key}.columns.{name}", f"write the position as `{int(name)}`.")
        for yours, number in Counter(named.values()).items():
            if number > 1:
                yield Problem(f"{key}.columns", f"two positions have the name `{yours}`. Give each its own.")


def file_keys_fit_the_kind(config: RunConfig) -> Iterator[Problem]:
    """A key that applies only to some types of files is not set for the others."""
    for key, source in row_sources(config):
        kind = _kind(source)
        where = f"`{kind}` files" if source.path else "a hub dataset" if source.name else "a plugin's source"
        if source.path is not None and kind not in (*TEXT_KINDS, *TABLE_KINDS):
            continue  # a folder: its files are checked when they are read
        written = {name: kinds for name, kinds in KINDS_OF_KEYS.items() if getattr(source, name) is not None}
        if source.has_positions:
            written["columns"] = KINDS_WITH_POSITIONS
        for name, kinds in written.items():
            if kind not in kinds:
                what = "columns have positions" if name == "columns" else "it is read"
                instead = "Write their names." if name == "columns" else "Remove it."
                yield Problem(f"{key}.{name}", f"{what} in {format_list(kinds)} files only, not in {where}. {instead}")


def _kind(source: SourceSection) -> str:
    """Return the suffix of the path without compression, such as `.csv`; empty if there is none."""
    name = without_query(source.path or "").rpartition("/")[2].lower()
    name = name.removesuffix(".gz").removesuffix(".zst")
    return f".{name.rpartition('.')[2]}" if "." in name else ""


RULES = (
    source_has_an_address,
    text_can_be_read,
    positions_have_names,
    file_keys_fit_the_kind,
    streams_fit,
)
