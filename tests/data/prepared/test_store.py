"""A prepared set is mapped, not read: what it costs does not grow with its size."""

import pickle
import tracemalloc

import numpy as np
import pytest

from finetune.data.prepared.chunks import Chunk
from finetune.data.prepared.counts import Counts
from finetune.data.prepared.store import Identity, PreparedSet
from finetune.data.prepared.writing import SetWriter


def chunk_of(num_samples, *, length, origins):
    tokens = np.arange(num_samples * length, dtype=np.uint32)
    return Chunk(
        values={"input_ids": tokens, "is_target": tokens % 2 == 1},
        lengths=dict.fromkeys(("input_ids", "is_target"), np.full(num_samples, length)),
        num_targets=np.full(num_samples, length // 2, np.int32),
        digests=np.arange(num_samples, dtype=np.uint64),
        marks=np.arange(num_samples, dtype=np.uint64),
        row_numbers=np.arange(1, num_samples + 1),
        origins=origins,
        counts=Counts(rows=num_samples, samples=num_samples, longest=length, longest_place="a.jsonl, row 1"),
    )


@pytest.fixture
def write(tmp_path):
    def write(chunks, *, shards=()):
        folder = tmp_path / f"set{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        writer = SetWriter(folder, Identity("f", {}, shards))
        for chunk in chunks:
            writer.append(chunk)
        writer.finish()
        writer.close()
        return folder

    return write


def test_samples_are_found_by_position(write):
    prepared = PreparedSet(write([chunk_of(100, length=3, origins=((0, "a.jsonl"),))] * 2))
    assert len(prepared) == 200
    assert prepared[57].arrays["input_ids"].tolist() == prepared[157].arrays["input_ids"].tolist() == [171, 172, 173]
    assert prepared[157].sample_id == 157
    assert prepared.lengths_of(np.array([3, 199])).tolist() == [3, 3]


def test_places_are_those_of_the_files_as_they_are_named_now(write):
    origins = ((0, "a.jsonl"), (2, "b, row 3.jsonl"))
    folder = write([chunk_of(4, length=3, origins=origins)], shards=("a.jsonl", "b, row 3.jsonl"))
    as_made, moved = PreparedSet(folder), PreparedSet(folder, shards=("new/a.jsonl", "new/b.jsonl"))
    assert [as_made.place(i) for i in (1, 2)] == ["a.jsonl, row 2", "b, row 3.jsonl, row 3"]
    assert [moved.place(i) for i in (1, 2)] == ["new/a.jsonl, row 2", "new/b.jsonl, row 3"]
    assert moved.counts.longest_place == "new/a.jsonl, row 1"
    assert pickle.loads(pickle.dumps(moved)).place(3) == "new/b.jsonl, row 4"


def test_an_origin_that_goes_on_in_the_next_chunk_is_kept_once(write):
    folder = write([chunk_of(4, length=3, origins=((0, "a.jsonl"),))] * 3)
    prepared = PreparedSet(folder)
    assert (folder / "counts.json").read_text().count('"a.jsonl"') == 1
    assert prepared.place(11) == "a.jsonl, row 4"


def test_opening_takes_no_memory_that_grows_with_the_set(write):
    small = write([chunk_of(10, length=3, origins=((0, "a.jsonl"),))])
    large = write([chunk_of(20_000, length=50, origins=((0, "a.jsonl"),))] * 5)
    assert sum(path.stat().st_size for path in large.iterdir()) > 25_000_000
    assert abs(memory_of_opening(large) - memory_of_opening(small)) < 20_000


def memory_of_opening(folder):
    tracemalloc.start()
    prepared = PreparedSet(folder)
    prepared[len(prepared) - 1]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_of_making_a_set_does_not_grow_with_it(tmp_path):
    chunk = chunk_of(1000, length=50, origins=((0, "a.jsonl"),))
    peaks = []
    for num_chunks in (4, 80):
        folder = tmp_path / str(num_chunks)
        folder.mkdir()
        tracemalloc.start()
        writer = SetWriter(folder, Identity("f", {}))
        for _ in range(num_chunks):
            writer.append(chunk)
        writer.note()
        writer.finish()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        writer.close()
    assert peaks[1] < peaks[0] + 50_000
