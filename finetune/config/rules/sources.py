"""Rules of row sources: exactly one origin, at a supported address; and the limits of streams."""

from collections.abc import Iterator

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.paths import is_path, is_url
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import SourceSection, TrainedSourceSection, ValidationSourceSection
from finetune.errors import Problem

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


def source_is_written_once(config: RunConfig) -> Iterator[Problem]:
    """Each source has exactly one origin."""
    more = {
        "data.train": ", or `mix` (several of these)",
        "data.validation": ", or split the training rows (`fraction` or `hash_fraction`)",
    }
    for key, source in source_sections(config):
        names = ("path", "name", "source", *(SPLIT_KEYS if isinstance(source, ValidationSourceSection) else ()))
        written = [name for name in names if getattr(source, name) is not None]
        if not written:
            message = f"no rows are given. Write `path` (files) or `name` (a hub dataset){more.get(key, '')}."
            yield Problem(key, message)
        for name in written[1:]:
            yield Problem(
                f"{key}.{name}", f"the rows are already given by `{key}.{written[0]}`. Keep only one of them."
            )


def dataset_name_is_no_path(config: RunConfig) -> Iterator[Problem]:
    """A hub dataset is not a path."""
    for key, source in row_sources(config):
        if source.name is not None and is_path(source.name):
            yield Problem(f"{key}.name", f"`{source.name}` is a path, not a hub dataset. Write it as `path`.")


def source_url_is_supported(config: RunConfig) -> Iterator[Problem]:
    """Rows at a URL are in supported storage, and the URL contains no secret."""
    for key, source in row_sources(config):
        if source.path is None or not is_url(source.path):
            continue
        scheme, _, rest = source.path.partition("://")
        if scheme not in SCHEMES:
            hint = did_you_mean(scheme, SCHEMES) or f"Supported: {format_list(SCHEMES[:-1])}."
            yield Problem(f"{key}.path", f"the storage `{scheme}://` is not supported. {hint}")
        elif "@" in rest.partition("/")[0]:
            yield Problem(
                f"{key}.path", "secrets do not belong in a job file. Use the storage's environment variables."
            )


SOURCE_RULES = (source_is_written_once, dataset_name_is_no_path, source_url_is_supported)


STREAM_SPLIT_KEYS = ("fraction", "hash_fraction")


def stream_sources(config: RunConfig) -> Iterator[tuple[str, TrainedSourceSection]]:
    """Yield each source that is streamed with its dotted key."""
    train = config.data.train
    for number, source in enumerate(train.mix):
        if source.stream is not None:
            yield f"data.train.mix.{number}", source
    if train.stream is not None and not train.mix:
        yield "data.train", train


def stream_budget_is_in_steps(config: RunConfig) -> Iterator[Problem]:
    """The length of a stream is unknown."""
    for key, _ in stream_sources(config):
        for name in ("epochs", "tokens"):
            if getattr(config.train, name) is not None:
                message = f"the length of the stream `{key}` is unknown. Use `train.steps`."
                yield Problem(f"train.{name}", message)


def stream_has_no_split(config: RunConfig) -> Iterator[Problem]:
    """A validation split of the training rows is prepared before the first step, for which a stream is too large."""
    validation = config.data.validation
    for key, _ in stream_sources(config):
        for name in STREAM_SPLIT_KEYS:
            if validation is not None and getattr(validation, name) is not None:
                yield Problem(
                    f"data.validation.{name}",
                    f"splitting it off would read the whole stream `{key}` before the first step. Give a `path` "
                    "of validation rows; `exclude_from_train: true` leaves them out of the stream.",
                )


def stream_window_holds_a_step(config: RunConfig) -> Iterator[Problem]:
    """A window holds at least the rows that are sorted by length or trained on at once."""
    steps, batch = max(1, config.data.batching.num_sorted_steps), config.train.global_batch_size
    for key, source in stream_sources(config):
        assert source.stream is not None
        if source.stream.window_rows < steps * batch:
            what = f"{steps} steps of {batch}, sorted by length together," if steps > 1 else f"a step of {batch}"
            message = (
                f"{source.stream.window_rows:,} rows are fewer than {what} needs. Write at least {steps * batch:,}."
            )
            yield Problem(f"{key}.stream.window_rows", message)


def stream_has_no_slice(config: RunConfig) -> Iterator[Problem]:
    """A stream cannot be sliced: its rows are not counted."""
    for key, source in stream_sources(config):
        if source.name is not None and "[" in source.split:
            whole = source.split.partition("[")[0]
            message = f"a slice cannot be streamed. Write `{whole}`, and use `skip` and `take` to select rows."
            yield Problem(f"{key}.split", message)


STREAM_RULES = (stream_budget_is_in_steps, stream_has_no_split, stream_window_holds_a_step, stream_has_no_slice)
