"""The job's options for reading text files: delimiter, quotes, encoding, column positions, and the path of records."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from finetune.config.section import KINDS_OF_KEYS, KINDS_WITH_POSITIONS
from finetune.config.sections.data import SourceSection
from finetune.errors import DataError


@dataclass(frozen=True)
class ReadOptions:
    """The defaults read every file as UTF-8, with the delimiter of its extension and a header."""

    delimiter: str | None = None
    quotes: bool | None = None
    encoding: str | None = None
    records: str | None = None
    has_header: bool = True
    names: tuple[tuple[int, str], ...] = ()  # of columns by position, without a header

    def identity(self) -> Mapping[str, Any]:
        """Return the options that differ from the defaults, as JSON values."""
        values = asdict(self)
        return {option.name: values[option.name] for option in fields(self) if values[option.name] != option.default}

    def column_name(self, position: int) -> str:
        """Return the name of a column without a header: the configured name, or else its position."""
        return dict(self.names).get(position, str(position))


DEFAULT_OPTIONS = ReadOptions()


def read_options(section: SourceSection, endings: Iterable[str], *, key: str) -> ReadOptions:
    """Return the options for files with these extensions; raises DataError for an option that they do not have."""
    extensions = set(endings)
    if section.has_positions:
        _require_kind(extensions, KINDS_WITH_POSITIONS, key=f"{key}.columns", what="columns by position are")
    for name, allowed in KINDS_OF_KEYS.items():
        if getattr(section, name) is not None:
            _require_kind(extensions, allowed, key=f"{key}.{name}", what="it is")
    return ReadOptions(
        section.delimiter,
        section.quotes,
        section.encoding,
        section.records,
        has_header=not section.has_positions,
        names=tuple(sorted(section.named_positions.items())),
    )


def _require_kind(extensions: set[str], allowed: tuple[str, ...], *, key: str, what: str) -> None:
    others = sorted(extensions - set(allowed))
    if others:
        raise DataError(f"{key}: {what} read of {' and '.join(allowed)} files only, not of {others[0]}. Remove it.")
