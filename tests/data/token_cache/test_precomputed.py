import pickle

import numpy as np
import pytest

from finetune.data.features import Features
from finetune.data.token_cache.cache import TokenCacheWriter
from finetune.data.token_cache.chunks import EncodedChunk
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.store import Identity, PrecomputedArrays, PrecomputedWriter, TokenCache
from finetune.errors import DataError
from tests.refusals import refused

VALUES = [np.array([1.0, 2.0], np.float32), np.array([], np.float32), np.array([3.0], np.float32)]


@pytest.fixture
def prepared_of(tmp_path):
    """Return a function that makes a prepared set of so many samples of one token."""

    def make(num_samples: int) -> TokenCache:
        place = tmp_path / f"set-{num_samples}"
        place.mkdir()
        ones = np.ones(num_samples, np.int64)
        writer = TokenCacheWriter(place, Identity("f", {}))
        writer.append(
            EncodedChunk(
                values={"input_ids": ones.astype(np.uint32)},
                lengths={"input_ids": ones},
                num_targets=ones.astype(np.int32),
                digests=ones.astype(np.uint64),
                checksums=ones.astype(np.uint64),
                row_numbers=ones,
                origins=((0, "a.jsonl"),),
                counts=Counts(rows=num_samples, samples=num_samples),
            )
        )
        writer.finish()
        return TokenCache(place)

    return make


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "known"
    place.mkdir()
    writer = PrecomputedWriter(place)
    writer.append([{"a": value, "b": np.array([number])} for number, value in enumerate(VALUES[:2])])
    writer.append([])
    writer.append([{"a": VALUES[2], "b": np.array([2])}])
    writer.finish({"set": "x"})
    return place


def test_a_damaged_folder_of_precomputed_arrays_is_reported(folder):
    (folder / "known.json").write_text("{")
    with refused(DataError, "known.json"):
        PrecomputedArrays(folder)


def test_precomputed_arrays_are_appended_to_the_arrays_of_a_sample(folder, prepared_of):
    prepared = prepared_of(3)
    made = TokenCache(prepared.folder, PrecomputedArrays(folder))
    assert isinstance(made[0], Features)
    assert list(made[2].arrays) == [*prepared[2].arrays, "a", "b"]
    assert made[2].arrays["a"].tolist() == [3]
    assert made[2].length == prepared[2].length
    sent = pickle.loads(pickle.dumps(made))
    assert sent[0].arrays["a"].tolist() == [1, 2]


def test_precomputed_arrays_of_another_number_of_samples_are_rejected(folder, prepared_of):
    with refused(DataError, "3 samples"):
        TokenCache(prepared_of(2).folder, PrecomputedArrays(folder))
