"""Rows of a dataset on the Hugging Face hub; reads data files only and never runs dataset code."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from finetune.config.sections.data import SourceSection, TrainedSourceSection
from finetune.data.rows import RawRow
from finetune.data.sources.files import Origin
from finetune.data.sources.tables import ClassNames, class_names, without_fillers
from finetune.data.upstream import set_datasets_offline
from finetune.errors import DataError
from finetune.runtime.optional import require
from finetune.runtime.upstream import is_offline, without_hub_retries


@dataclass(frozen=True)
class _HubSplit:
    """Base of the splits of a hub dataset."""

    name: str
    dataset: Any  # datasets.Dataset or IterableDataset
    local: str  # its name, which may be a folder

    def image_folders(self) -> Sequence[Path]:
        """Return the download folders of `datasets` and, if it is one, the dataset's own folder."""
        datasets = require("datasets", extra="dev", purpose="Reading a hub dataset")
        kept = (datasets.config.HF_DATASETS_CACHE, datasets.config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
        own = [Path(self.local).absolute()] if Path(self.local).is_dir() else []
        return (*own, *(Path(folder).expanduser() for folder in kept))

    def class_names(self) -> ClassNames:
        """Return the names of its `ClassLabel` columns, if the dataset describes its columns."""
        features = getattr(self.dataset, "features", None)  # unknown of some streams
        return class_names(features.to_dict()) if features else {}


@dataclass(frozen=True)
class HubDataset(_HubSplit):
    """A downloaded split of a hub dataset: its own only shard."""

    def digest(self) -> str:
        """Return the fingerprint of `datasets`."""
        return str(self.dataset._fingerprint)

    def listing(self) -> Any:
        """Return the fingerprint, which requires no reading."""
        return self.digest()

    def shards(self) -> Sequence["HubDataset"]:
        """Return itself: a downloaded dataset can be read from any row on."""
        return (self,)

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the rows in the dataset's order, without the first `start`."""
        kept = range(min(start, len(self.dataset)), len(self.dataset))
        for number, row in enumerate(self.dataset.select(kept), start=start + 1):
            yield RawRow(self.name, number, without_fillers(row))

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows, but at most `at_most`."""
        return min(at_most, len(self.dataset))


@dataclass(frozen=True)
class HubStream(_HubSplit):
    """A split of a hub dataset that is read over the network, shard by shard."""

    version: str  # of the files on the hub

    def digest(self) -> str:
        """Return the version of the files, whose content has not been read."""
        return self.version

    def listing(self) -> Any:
        """Return name and version."""
        return [self.name, self.version]

    def shards(self) -> Sequence["HubShard"]:
        """Return the shards that `datasets` makes of the split's files."""
        return tuple(HubShard(self, number) for number in range(self.dataset.num_shards))


@dataclass(frozen=True)
class HubShard:
    """One shard of a stream."""

    stream: HubStream
    number: int

    @property
    def name(self) -> str:
        """Return the dataset and the number of the shard."""
        return f"{self.stream.name}, shard {self.number}"

    def rows(self, start: int = 0) -> Iterator[RawRow]:
        """Yield the shard's rows without the first `start`."""
        dataset = self.stream.dataset
        shard = dataset.shard(num_shards=dataset.num_shards, index=self.number)
        try:
            for number, row in enumerate(shard.skip(start) if start else shard, start=start + 1):
                yield RawRow(self.name, number, without_fillers(row))
        except Exception as error:  # of the network, and of the files' formats
            raise DataError(f"{self.name} cannot be read: {_reason(error)}") from error

    def num_rows(self, at_most: int) -> int:
        """Return the number of rows, but at most `at_most`."""
        return sum(1 for _, _ in zip(range(at_most), self.rows(), strict=False))


def load_hub_dataset(source: SourceSection) -> Origin:
    """Return the split, downloaded unless it is cached, or streamed if the section has `stream`.

    Raises DataError if it cannot be loaded.
    """
    assert source.name is not None
    is_streamed = isinstance(source, TrainedSourceSection) and source.stream is not None
    try:
        with without_hub_retries(is_local=False):
            datasets = require("datasets", extra="dev", purpose="Reading a hub dataset")
            set_datasets_offline(datasets, is_offline=is_offline())
            if is_streamed:
                builder = datasets.load_dataset_builder(source.name, source.config, revision=source.revision)
                dataset = _undecoded(datasets, builder.as_streaming_dataset(split=source.split))
                return HubStream(_title(source), dataset, str(source.name), str(builder.hash))
            dataset = datasets.load_dataset(
                source.name, source.config, split=source.split, revision=source.revision, streaming=False
            )
            return HubDataset(_title(source), _undecoded(datasets, dataset), str(source.name))
    except Exception as error:  # `datasets` raises many exception types for a bad name
        raise DataError(f"hub dataset {_title(source)} cannot be loaded: {_reason(error)}") from error


def _undecoded(datasets: Any, dataset: Any) -> Any:
    """Return the dataset with its images as encoded bytes; they are decoded when batches are made."""
    for column, feature in (getattr(dataset, "features", None) or {}).items():
        if isinstance(feature, datasets.Image):
            dataset = dataset.cast_column(column, datasets.Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), datasets.Image):
            dataset = dataset.cast_column(column, type(feature)(datasets.Image(decode=False)))
    return dataset


def _title(source: SourceSection) -> str:
    config = f", config {source.config}" if source.config else ""
    revision = f", revision {source.revision}" if source.revision else ""
    return f"`{source.name}`{config}, split {source.split}{revision}"


def _reason(error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if isinstance(error, ConnectionError):
        return f"the hub cannot be reached ({reason}). Go online once, or pass a local file with `path`."
    if "scripts are no longer supported" in reason:
        return "it consists of Python code, which is never run. Convert it to Parquet and pass that with `path`."
    return (
        f"{reason.rstrip('.')}. Check `name`, `config`, `split` and `revision`; private ones require `hf auth login`."
    )
