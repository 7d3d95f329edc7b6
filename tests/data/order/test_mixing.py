"""Weights, rows and epochs become counts; what a source has of the run is told."""

import numpy as np
import pytest

from finetune.config.sections.data import TrainingSourceSection
from finetune.data.features import Features
from finetune.data.order.mixing import mixed
from finetune.data.order.order import SetOrder
from finetune.data.order.pool import Pool
from finetune.data.order.sample_ids import of_source, sources_of
from finetune.errors import DataError


class Rows:
    """Samples of one source, sample i of i + 1 tokens."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, index):
        return Features({"input_ids": np.full(index + 1, index, np.uint32)}, index)

    def place(self, index):
        return f"{self.name}, row {index + 1}"

    def lengths_of(self, ids):
        return ids + 1


def pools(*sizes):
    return [
        Pool(Rows(f"{n}.jsonl"), SetOrder(seed=n, num_samples=size), f"f{n}") if size else endless()
        for n, size in enumerate(sizes)
    ]


def endless():
    class Stream:
        num_positions = None

    return Pool(Rows("stream"), Stream(), "s")


def section(*sources, **keys):
    mix = tuple({"path": f"{n}.jsonl", **source} for n, source in enumerate(sources))
    return TrainingSourceSection(mix=mix, **keys)


def mix_of(sizes, sources, **keys):
    return mixed(pools(*sizes), section(*sources, **keys), seed=1, unit="samples")


def shares(pool, num):
    return np.bincount(sources_of(pool.order.samples(0, num))).tolist()


@pytest.mark.parametrize(
    ("weights", "window", "counts"),
    [
        ([0.5, 0.3, 0.2], 10, [5, 3, 2]),
        ([1, 2, 3], 6, [1, 2, 3]),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([0.1, 0.2], 3, [1, 2]),
        ([1, 9_999], 10_000, [1, 9_999]),
        ([1, 3, 12_345.6789], 10_000, [1, 2, 9_997]),
    ],
)
def test_weights_are_exact_in_windows_as_small_as_they_allow(weights, window, counts):
    pool = mix_of([70] * len(weights), [{"weight": weight} for weight in weights])
    assert pool.order.window_size == window
    assert shares(pool, window) == counts


def test_a_weight_too_small_to_appear_is_refused_by_name():
    with pytest.raises(DataError, match=r"data.train.mix.1.weight: 1e-05 is less than one in 10,000"):
        mix_of([5, 5], [{"weight": 1.0}, {"weight": 0.00001}])


def test_rows_and_epochs_make_a_pass():
    by_rows = mix_of([50, 20], [{"rows": 30}, {"rows": 45}])
    assert (by_rows.order.num_positions, shares(by_rows, 75)) == (75, [30, 45])
    by_epochs = mix_of([50, 20], [{"epochs": 0.5}, {"epochs": 2}])
    assert (by_epochs.order.num_positions, shares(by_epochs, 65)) == (65, [25, 40])


def test_epochs_of_a_stream_and_less_than_a_sample_are_refused():
    with pytest.raises(DataError, match=r"data.train.mix.1.epochs: nobody knows how long a stream is"):
        mix_of([5, 0], [{"epochs": 1}, {"epochs": 1}])
    with pytest.raises(DataError, match=r"data.train.mix.0.epochs: 0.01 of the source's 5 is less than one"):
        mix_of([5, 5], [{"epochs": 0.01}, {"epochs": 1}])


def test_a_sample_is_found_by_its_id_and_keeps_it():
    pool = mix_of([5, 7], [{"weight": 1}, {"weight": 1}])
    sample_id = of_source(1) + 3
    assert pool.samples[sample_id].sample_id == sample_id
    assert pool.samples[sample_id].arrays["input_ids"].tolist() == [3, 3, 3, 3]
    assert pool.samples.place(sample_id) == "1.jsonl, row 4"
    assert pool.samples.lengths_of(np.array([2, sample_id, 0])).tolist() == [3, 4, 1]


def test_what_each_source_has_of_the_run_is_told():
    pool = mix_of([70, 10], [{"weight": 3}, {"weight": 7}])
    assert pool.lines(100) == (
        "data.train.mix.0 (0.jsonl): 30 of 100 samples in this run (30.0%), 0.43 passes over its 70",
        "data.train.mix.1 (1.jsonl): 70 of 100 samples in this run (70.0%), 7.00 passes over its 10",
    )


def test_a_mix_is_known_by_its_parts_and_their_counts():
    one = mix_of([5, 7], [{"weight": 1}, {"weight": 1}])
    assert one.fingerprint == mix_of([5, 7], [{"weight": 2}, {"weight": 2}]).fingerprint
    assert one.fingerprint != mix_of([5, 7], [{"weight": 1}, {"weight": 2}]).fingerprint
    assert one.fingerprint != mix_of([5, 7], [{"weight": 1}, {"weight": 1}], until="all").fingerprint
