"""How text files are read: the job's options, and transcoding to UTF-8 with errors for invalid bytes."""

import codecs
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, BinaryIO

from finetune.config.section import KINDS_OF_KEYS, KINDS_WITH_POSITIONS
from finetune.config.sections.data import SourceSection
from finetune.data.rows import not_utf8
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
    limited = {
        name: (allowed, "it is") for name, allowed in KINDS_OF_KEYS.items() if getattr(section, name) is not None
    }
    if section.has_positions:
        limited = {"columns": (KINDS_WITH_POSITIONS, "columns by position are"), **limited}
    for name, (allowed, what) in limited.items():
        if others := sorted(set(endings) - set(allowed)):
            kinds = ", ".join(allowed)
            raise DataError(f"{key}.{name}: {what} read in {kinds} files only, not in {others[0]} files. Remove it.")
    return ReadOptions(
        section.delimiter,
        section.quotes,
        section.encoding,
        section.records,
        has_header=not section.has_positions,
        names=tuple(sorted(section.named_positions.items())),
    )


_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHUNK_BYTES = 1 << 20
_SAMPLE_BYTES = 4096
_MIN_ZERO_SHARE = 0.4
"""The share of zero bytes in UTF-16 text of mostly Latin letters, in either byte order."""


def as_utf8(stream: io.BufferedReader, *, encoding: str | None, origin: str) -> io.BufferedReader:
    """Return the stream as UTF-8; it is transcoded if an encoding is configured or a byte order mark indicates one.

    Raises DataError if it looks like UTF-16 without a byte order mark.
    """
    if encoding is None:
        start = stream.peek(_SAMPLE_BYTES)[:_SAMPLE_BYTES]
        encoding = next((name for mark, name in _MARKS if start.startswith(mark)), None)
        if encoding is None:
            for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):  # nearly every second byte is zero
                zeros = start[first::2].count(0)
                if zeros and zeros >= _MIN_ZERO_SHARE * len(start) and not start[1 - first :: 2].count(0):
                    raise DataError(
                        f"{origin}: looks like UTF-16 without a byte order mark: every second byte is zero. Write "
                        f"`encoding: {name}` next to its path."
                    )
            return stream
    if codecs.lookup(encoding).name == "utf-8":
        return stream
    return io.BufferedReader(_Transcoded(stream, encoding, origin), _CHUNK_BYTES)


def decode_line(line: bytes, *, origin: str, number: int) -> str:
    """Return the text of a line in UTF-8; raises DataError naming line and byte."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{origin}, line {number}: {not_utf8(error)}") from error


def decoded_chunks(stream: BinaryIO, *, num_bytes: int, origin: str) -> Iterator[str]:
    """Yield the text of a stream in UTF-8 in pieces of that size; raises DataError naming line and byte."""
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    line, num_before = 1, 0  # of the next byte, and the bytes of its line before it
    while True:
        chunk = stream.read(num_bytes)
        num_pending = len(decoder.getstate()[0])
        try:
            text: str = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            first = error.object.rfind(b"\n", 0, error.start) + 1
            line += error.object.count(b"\n", 0, first)
            error.object, error.start = error.object[first:], error.start - first
            before = 0 if first else num_before - num_pending
            raise DataError(f"{origin}, line {line}: {not_utf8(error, num_before=before)}") from error
        if not chunk:
            return
        line += chunk.count(b"\n")
        num_before = len(chunk) - chunk.rfind(b"\n") - 1 + (0 if b"\n" in chunk else num_before)
        yield text


class _Transcoded(io.RawIOBase):
    """Reads text in any encoding as UTF-8; raises DataError naming offset and line of an invalid byte."""

    def __init__(self, stream: BinaryIO, encoding: str, origin: str) -> None:
        self._stream, self._encoding, self._origin = stream, encoding, origin
        self._decoder: Any = codecs.getincrementaldecoder(encoding)()
        self._pending = b""
        self._num_bytes, self._line = 0, 1  # bytes decoded so far, and the line of the next byte

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with UTF-8 and return the number of bytes; 0 at the end."""
        while not self._pending:
            chunk = self._stream.read(_CHUNK_BYTES)
            text = self._decoded(chunk)
            self._line += text.count("\n")
            self._pending = text.encode("utf-8")
            if not chunk:
                break
        output = self._pending[: len(buffer)]
        buffer[: len(output)] = output
        self._pending = self._pending[len(output) :]
        return len(output)

    def _decoded(self, chunk: bytes) -> str:
        num_pending = len(self._decoder.getstate()[0])
        try:
            text: str = self._decoder.decode(chunk, final=not chunk)
            text.encode("utf-8")
        except UnicodeDecodeError as error:
            offset = self._num_bytes - num_pending + error.start
            before = error.object[: error.start].decode(error.encoding, errors="ignore")
            line = self._line + before.count("\n")
            raise DataError(
                f"{self._origin}, line {line}: byte 0x{error.object[error.start]:02x} at offset {offset:,} is not "
                f"{self._encoding} ({error.reason}). Write another `encoding`, or fix the line."
            ) from error
        except UnicodeEncodeError as error:
            raise DataError(
                f"{self._origin}: contains half of a surrogate pair, which is not valid Unicode."
            ) from error
        except UnicodeError as error:  # utf-16 and utf-32 without a byte order mark
            raise DataError(
                f"{self._origin}: has no byte order mark, which {self._encoding} requires. Write "
                f"`encoding: {self._encoding}-le`, or remove `encoding` for UTF-8."
            ) from error
        self._num_bytes += len(chunk)
        return text
