"""A prepared set is mapped, not read: what it costs does not grow with its size."""

import pickle
import tracemalloc

import numpy as np
import pytest

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.data.token_cache.cache import TokenCacheWriter
from finetune.data.token_cache.chunks import EncodedChunk
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.store import Identity, TokenCache, dataset_view, grouped_by_length


def chunk_of(num_samples, *, length, origins):
    tokens = np.arange(num_samples * length, dtype=np.uint32)
    return EncodedChunk(
        values={"input_ids": tokens, "is_target": tokens % 2 == 1},
        lengths=dict.fromkeys(("input_ids", "is_target"), np.full(num_samples, length)),
        num_targets=np.full(num_samples, length // 2, np.int32),
        digests=np.arange(num_samples, dtype=np.uint64),
        checksums=np.arange(num_samples, dtype=np.uint64),
        row_numbers=np.arange(1, num_samples + 1),
        origins=origins,
        counts=Counts(rows=num_samples, samples=num_samples, longest=length, longest_place="a.jsonl, row 1"),
    )


@pytest.fixture
def write(tmp_path):
    def write(chunks, *, shards=()):
        folder = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        writer = TokenCacheWriter(folder, Identity("f", {}, shards))
        for chunk in chunks:
            writer.append(chunk)
        writer.finish()
        return folder

    return write


def test_places_are_those_of_the_files_as_they_are_named_now(write):
    origins = ((0, "a.jsonl"), (2, "b, row 3.jsonl"))
    folder = write([chunk_of(4, length=3, origins=origins)], shards=("a.jsonl", "b, row 3.jsonl"))
    as_made, moved = TokenCache(folder), TokenCache(folder, shards=("new/a.jsonl", "new/b.jsonl"))
    assert [as_made.location(i) for i in (1, 2)] == ["a.jsonl, row 2", "b, row 3.jsonl, row 3"]
    assert [moved.location(i) for i in (1, 2)] == ["new/a.jsonl, row 2", "new/b.jsonl, row 3"]
    assert moved.counts.longest_place == "new/a.jsonl, row 1"
    assert pickle.loads(pickle.dumps(moved)).location(3) == "new/b.jsonl, row 4"


def test_opening_takes_no_memory_that_grows_with_the_set(write):
    small = write([chunk_of(10, length=3, origins=((0, "a.jsonl"),))])
    large = write([chunk_of(20_000, length=50, origins=((0, "a.jsonl"),))] * 5)
    assert sum(path.stat().st_size for path in large.iterdir()) > 25_000_000
    assert abs(memory_of_opening(large) - memory_of_opening(small)) < 5_000_000  # a block that is verified


def memory_of_opening(folder):
    tracemalloc.start()
    prepared = TokenCache(folder)
    prepared[len(prepared) - 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


LENGTHS = np.array([6, 5, 5, 3, 1])


class Prepared:
    """What a pool needs of a prepared set."""

    lengths = LENGTHS
    fingerprint = "f"
    counts = Counts()

    def lengths_of(self, ids):
        return LENGTHS[ids]


def pool(prepared=None, **batching):
    source = TrainingSourceSection(path="/nowhere")
    section = DataSection(train=source, max_length=8, batching=BatchingSection(**batching))
    made = dataset_view(prepared or Prepared(), section, seed=1, key="data.train")
    return grouped_by_length(made, section.batching, seed=1, global_batch_size=2)


def test_the_log_reports_how_full_packs_are():
    assert pool(by="packs", tokens=10).lines(4) == ("data.train: 20 tokens in 2 packs of at most 10: 100.0% full",)
    assert pool(by="tokens").lines(4) == ("data.train: 20 tokens in 4 batches of at most 8: 62.5% full",)


@pytest.mark.parametrize(
    ("batching", "is_same"),
    [
        ({"padding_free": True}, True),
        ({"length_window_steps": 1}, True),  # alters no step
        ({"length_window_steps": 2}, False),
        ({"by": "packs"}, False),
        ({"by": "packs", "tokens": 9}, False),
        ({"by": "tokens"}, False),
    ],
)
def test_only_settings_that_move_samples_to_other_steps_change_the_fingerprint(batching, is_same):
    assert (pool(**batching).fingerprint == pool().fingerprint) == is_same


@pytest.mark.parametrize("batching", [{}, {"by": "tokens", "tokens": 8}, {"by": "packs"}], ids=str)
def test_samples_in_which_control_tokens_became_text_are_others_than_before(batching):
    with_names = Prepared()
    with_names.counts = Counts(control_rows=1)
    assert pool(**batching).fingerprint != pool(with_names, **batching).fingerprint
    assert pool(**batching).fingerprint == pool(**batching).fingerprint
