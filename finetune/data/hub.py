"""Rows of a dataset on the Hugging Face hub; data files only, never a dataset's own code."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finetune.config.sections.data import SourceSection
from finetune.data.rows import RawRow
from finetune.errors import DataError
from finetune.runtime.hub import is_offline, without_vain_retries
from finetune.runtime.optional import require


@dataclass(frozen=True)
class HubDataset:
    """A downloaded split of a hub dataset."""

    name: str
    dataset: Any  # datasets.Dataset

    def digest(self) -> str:
        """Return the fingerprint that `datasets` gives to the content."""
        return str(self.dataset._fingerprint)

    def listing(self) -> Any:
        """Return the fingerprint: it needs no reading."""
        return self.digest()

    def shards(self) -> Sequence["HubDataset"]:
        """Return itself: what has been downloaded is read from any row on."""
        return (self,)

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows in the dataset's order, without the first `start`."""
        kept = range(min(start, len(self.dataset)), len(self.dataset))
        for number, row in enumerate(self.dataset.select(kept) if start else self.dataset, start=start + 1):
            yield RawRow(self.name, number, row)

    def num_rows(self, at_most: int) -> int:
        """Return how many rows there are, or `at_most`."""
        return min(at_most, len(self.dataset))


def load_hub_dataset(source: SourceSection) -> HubDataset:
    """Return the split, downloading it where it is not at hand; raises DataError when it cannot be had."""
    assert source.name is not None
    try:
        with without_vain_retries(is_local=False):
            datasets = require("datasets", extra="dev", purpose="Reading a hub dataset")
            datasets.config.HF_HUB_OFFLINE = is_offline()  # its own copy, taken when it was imported
            dataset = datasets.load_dataset(
                source.name, source.config, split=source.split, revision=source.revision, streaming=False
            )
    except Exception as error:  # `datasets` raises many kinds: none is a fault of ours, all are about this name
        raise DataError(f"hub dataset {_title(source)} cannot be had: {_reason(error)}") from error
    return HubDataset(_title(source), dataset)


def _title(source: SourceSection) -> str:
    config = f", config {source.config}" if source.config else ""
    revision = f", revision {source.revision}" if source.revision else ""
    return f"`{source.name}`{config}, split {source.split}{revision}"


def _reason(error: Exception) -> str:
    said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ConnectionError):
        return f"the hub cannot be reached ({said}). Go online once, or give a local file with `path`."
    if "scripts are no longer supported" in said:
        return "it comes as Python code, which is never run. Convert it to Parquet and give that with `path`."
    return f"{said} Check `name`, `config`, `split` and `revision`; a private one needs `hf auth login`."
