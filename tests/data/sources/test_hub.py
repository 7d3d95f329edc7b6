"""Datasets of the hub, as `datasets` reads them from a folder of this machine, and why one cannot be had."""

import pickle
from itertools import chain
from types import SimpleNamespace

import pytest

from finetune.config.sections.data import SourceSection, StreamSection, TrainedSourceSection
from finetune.data.sources import local
from finetune.data.sources.local import load_hub_dataset
from finetune.errors import DataError
from tests.refusals import refused


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Return the name of a dataset of three files of four rows."""
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    (tmp_path / "dataset").mkdir()
    for part in range(3):
        rows = (f'{{"text": "{part} {row}", "parts": [{{"a": 1}}, {{"b": 2}}]}}\n' for row in range(4))
        (tmp_path / "dataset" / f"train-{part}.jsonl").write_text("".join(rows))
    return str(tmp_path / "dataset")


def texts(rows):
    return [raw.parse()["text"] for raw in rows]


ALL = [f"{part} {row}" for part in range(3) for row in range(4)]


def test_a_split_and_a_slice_of_it_are_read_from_any_row_on(dataset):
    whole = load_hub_dataset(SourceSection(name=dataset))
    (shard,) = whole.shards()
    assert texts(shard.rows()) == ALL
    assert texts(shard.rows(10)) == ALL[10:]
    assert next(shard.rows(10)).number == 11
    assert next(shard.rows()).content["parts"] == [{"a": 1}, {"b": 2}]
    assert (shard.num_rows(at_most=5), shard.num_rows(at_most=99)) == (5, 12)
    part = load_hub_dataset(SourceSection(name=dataset, split="train[2:5]"))
    assert texts(part.shards()[0].rows()) == ALL[2:5]
    assert part.digest != whole.digest


def test_a_stream_has_a_shard_for_every_file(dataset):
    section = TrainedSourceSection(name=dataset, stream=StreamSection())
    stream = load_hub_dataset(section)
    shards = pickle.loads(pickle.dumps(stream.shards()))
    assert texts(chain.from_iterable(shard.rows() for shard in shards)) == ALL
    assert [(raw.number, raw.parse()["parts"]) for raw in shards[1].rows(3)] == [(4, [{"a": 1}, {"b": 2}])]
    assert shards[2].num_rows(at_most=3) == 3
    assert stream.listing() == load_hub_dataset(section).listing()


def test_a_split_that_is_not_there_is_named(dataset):
    with refused(DataError, "`name`"):
        load_hub_dataset(SourceSection(name=dataset, split="dev"))


class FailingHub:
    def __init__(self, error):
        self.error = error
        self.config = SimpleNamespace(HF_HUB_OFFLINE=False)

    def load_dataset(self, *_, **__):
        raise self.error


HUB_ERRORS = [
    ConnectionError("Couldn't reach the Hub"),
    FileNotFoundError("Dataset 'me/mine' doesn't exist."),
    RuntimeError("Dataset scripts are no longer supported, but found mine.py"),
]


@pytest.mark.parametrize("error", HUB_ERRORS)
def test_a_hub_dataset_that_cannot_be_loaded_is_reported_with_the_reason(monkeypatch, error):
    monkeypatch.setattr(local, "require", lambda *_, **__: FailingHub(error))
    with refused(DataError, "`me/mine`"):
        load_hub_dataset(SourceSection(name="me/mine", config="main", split="test"))
