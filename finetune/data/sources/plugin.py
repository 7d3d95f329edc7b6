"""Rows that a plugin's source returns."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.config.sections.data import SourceSection
from finetune.data.rows import RawRow, describe
from finetune.data.sources.files import OriginShard
from finetune.data.sources.tables import ClassNames
from finetune.errors import DataError
from finetune.registry.formats import SOURCES


@dataclass(frozen=True)
class PluginRows:
    """All rows of a plugin's source, which is called again for each pass: one shard."""

    source: str  # its name in the registry

    @property
    def name(self) -> str:
        """Return what it is called in messages."""
        return f"the source `{self.source}`"

    def shards(self) -> Sequence[OriginShard]:
        """Return itself: the rows cannot be read in parts."""
        return (self,)

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows without the first `start`; raises DataError where the plugin fails, or returns no row."""
        try:
            for number, row in enumerate(islice(SOURCES.resolve(self.source)(), start, None), start + 1):
                if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
                    raise DataError(
                        f"{self.name}, row {number}: a row is a dictionary of columns, not {describe(row)}."
                    )
                yield RawRow(self.name, number, row)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{self.name} failed: {type(error).__name__}: {error}") from error

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows, but at most `at_most`."""
        return sum(1 for _ in islice(self.rows(), at_most))

    def digest(self) -> str:
        """Return a digest of all rows."""
        digest = hashlib.sha256()
        for row in self.rows():
            digest.update(json.dumps(row.content, sort_keys=True, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def listing(self) -> Any:
        """Return the same: only reading the rows shows whether they have changed."""
        return [self.source, self.digest()]

    def image_folders(self) -> Sequence[Path]:
        """Return nothing: its rows name images by absolute paths, or hold them."""
        return ()

    def class_names(self) -> ClassNames:
        """Return nothing: numbers of classes have no names."""
        return {}


def load_plugin_rows(section: SourceSection) -> PluginRows:
    """Return the rows of the section's source."""
    assert section.source is not None
    return PluginRows(section.source)
