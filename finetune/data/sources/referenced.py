"""Files that rows refer to, such as images: other content in them is other data, though the rows stay the same."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from finetune.data.formats.row_format import RowFormat
from finetune.data.images.read import StoredImage
from finetune.data.rows import RawRow, Row
from finetune.data.sources.image_folder import ImageFolder
from finetune.data.sources.origin import Origin
from finetune.errors import DataError
from finetune.runtime.digests import files_digest


def referenced_digest(origin: Origin, form: RowFormat) -> str | None:
    """Return a digest of the files that the rows refer to; None where the first row refers to none.

    A folder of images is known by them already. Raises DataError for a file that cannot be read.
    """
    if isinstance(origin, ImageFolder):
        return None
    files = (_files_of(raw, form) for shard in origin.shards() for raw in shard.rows())
    first = next(files, [])
    if not first:
        return None
    try:
        return files_digest([*first, *chain.from_iterable(files)])
    except OSError as error:
        raise DataError(f"a row refers to {error.filename}, which cannot be read: {error.strerror}.") from error


def _files_of(raw: RawRow, form: RowFormat) -> list[Path]:
    row = form.read(raw)
    try:
        return list(referenced_files(row))
    except DataError as error:
        raise DataError(f"{raw.place}: {error}") from error


def referenced_files(row: Row) -> Iterator[Path]:
    """Yield the files that the row refers to, in its order; raises DataError for one that may not be read."""
    for value in row.values():
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, StoredImage) and each.path is not None:
                yield each.file()
