"""Rules for reading files of rows: encodings, delimiters, column positions, and the file types that have them."""

import codecs
from collections import Counter
from collections.abc import Iterator

from finetune.config.formatting import did_you_mean, format_list
from finetune.config.rules.sources import row_sources
from finetune.config.run_config import RunConfig
from finetune.config.section import KINDS_OF_KEYS, KINDS_WITH_POSITIONS, TABLE_KINDS, TEXT_KINDS
from finetune.config.sections.data import SourceSection
from finetune.errors import Problem
from finetune.runtime.text.secret_urls import without_query

_NOT_OF_TEXTS = ("idna", "punycode", "raw_unicode_escape", "undefined", "unicode_escape", "mbcs", "oem")
"""Python codecs that are not encodings of text files."""

_COMMON = ("utf-8", "utf-16", "utf-16-le", "utf-16-be", "latin-1", "cp1252", "cp1251", "shift_jis", "gb18030", "big5")


def encoding_is_known(config: RunConfig) -> Iterator[Problem]:
    """An encoding is one with which Python can read text."""
    for key, source in row_sources(config):
        if source.encoding is not None and not _is_text_codec(source.encoding):
            hint = did_you_mean(source.encoding, _COMMON) or f"Write one such as {format_list(_COMMON[:6])}."
            yield Problem(f"{key}.encoding", f"the encoding `{source.encoding}` does not exist. {hint}")


def _is_text_codec(name: str) -> bool:
    try:
        codec = codecs.lookup(name)
    except (LookupError, ValueError):  # an embedded zero, for one
        return False
    is_text = bool(getattr(codec, "_is_text_encoding", True))
    return is_text and codec.incrementaldecoder is not None and codec.name.replace("-", "_") not in _NOT_OF_TEXTS


def delimiter_is_usable(config: RunConfig) -> Iterator[Problem]:
    """A delimiter is a character that cannot be taken for the end of a line or for a quotation mark."""
    for key, source in row_sources(config):
        if source.delimiter in ("\n", "\r", '"', "\0"):
            message = 'a line break, a quotation mark or a NUL cannot separate columns. Write `";"`, `"|"` or `"\\t"`.'
            yield Problem(f"{key}.delimiter", message)


def positions_have_names(config: RunConfig) -> Iterator[Problem]:
    """A position maps to a name of its own that no other position can have."""
    for key, source in row_sources(config):
        named = {name: yours for name, yours in source.columns.items() if name.isdecimal()}
        for name, yours in named.items():
            if isinstance(yours, int) or yours.isdecimal() or not yours:
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


FILE_OPTION_RULES = (encoding_is_known, delimiter_is_usable, positions_have_names, file_keys_fit_the_kind)
