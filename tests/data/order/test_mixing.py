"""Which source stands where is a function of seed and position, exact in every window."""

import numpy as np
import pytest

from finetune.config.sections.data import TrainingSourceSection
from finetune.data.features import Features
from finetune.data.order.mixing import MixedOrder, mixed_view
from finetune.data.order.order import DatasetView, SetOrder, source_offset, sources_of, split_sample_id
from finetune.errors import DataError
from tests.data.order.test_grouping import made as packs
from tests.refusals import refused


def orders(*sizes):
    return [SetOrder(seed=source, num_positions=size) for source, size in enumerate(sizes)]


def mix(sizes, counts, *, seed=1, until="first"):
    return MixedOrder(orders(*sizes), counts, seed=seed, until=until)


def test_every_window_has_each_source_as_often_as_its_count():
    order = mix([50, 20, 9], [5, 3, 2])
    sources = sources_of(order.samples(0, 5000)).reshape(-1, 10)
    assert [sorted(window.tolist()) for window in sources] == [[0, 0, 0, 0, 0, 1, 1, 1, 2, 2]] * 500
    assert len({tuple(window.tolist()) for window in sources}) > 100


def test_a_source_is_gone_through_in_its_own_order():
    ids = mix([50, 20, 9], [5, 3, 2]).samples(0, 400)
    for source, order in enumerate(orders(50, 20, 9)):
        own = [split_sample_id(i).within for i in ids.tolist() if split_sample_id(i).source == source]
        assert own == order.samples(0, len(own)).tolist()


@pytest.mark.parametrize("counts", [[5, 3, 2], [700, 900, 20]])
def test_from_any_position_the_rest_is_the_same(counts):
    whole = mix([50, 20, 9], counts).samples(0, 4000)
    for start in range(0, 4000, 357):
        assert np.array_equal(mix([50, 20, 9], counts).samples(start, 4000), whole[start:])


def test_positions_that_hold_packs_stay_whole():
    order = MixedOrder([packs(seed=3), SetOrder(seed=1, num_positions=30)], [1, 2], seed=1, until="first")
    own = packs(seed=3).cut(0, 100, 1)
    seen = 0
    for position in order.cut(0, 90, 1):
        sources = set(sources_of(position).tolist())
        assert len(sources) == 1
        if sources == {0}:
            assert position.tolist() == next(own).tolist()
            seen += 1
    assert seen == 30
    assert order.samples(0, 90).tolist() == [i for position in order.cut(0, 90, 1) for i in position.tolist()]


def test_a_pass_lasts_until_the_first_source_is_used_up_or_until_all_are():
    for until, wanted in (("first", {0}), ("all", {0, 1, 2})):
        order = mix([30, 40, 90], [3, 2, 1], until=until)
        seen = order.samples(0, order.num_positions).tolist()
        before = order.samples(0, order.num_positions - 1).tolist()
        sizes = {0: 30, 1: 40, 2: 90}
        assert {s for s, size in sizes.items() if len(within(seen, s)) == size} >= wanted
        assert {s for s, size in sizes.items() if len(within(before, s)) == size} < wanted


def within(ids, source):
    return {i for i in ids if split_sample_id(i).source == source}


def test_a_mix_with_a_stream_has_no_known_end():
    class Stream:
        num_positions = None

    assert MixedOrder([Stream(), *orders(5)], [1, 1], seed=1, until="all").num_positions is None


def test_the_mix_is_the_same_on_every_machine_and_version():
    assert sources_of(mix([50, 20, 9], [5, 3, 2], seed=42).samples(0, 20)).tolist() == PINNED


PINNED = [1, 2, 0, 0, 2, 0, 1, 0, 1, 0, 0, 2, 1, 0, 0, 0, 0, 1, 2, 1]


class Rows:
    """Samples of one source, sample i of i + 1 tokens."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, index):
        return Features({"input_ids": np.full(index + 1, index, np.uint32)}, index)

    def location(self, index):
        return f"{self.name}, row {index + 1}"

    def lengths_of(self, ids):
        return ids + 1


def pools(*sizes):
    return [
        DatasetView(Rows(f"{n}.jsonl"), SetOrder(seed=n, num_positions=size), f"f{n}") if size else endless()
        for n, size in enumerate(sizes)
    ]


def endless():
    class Stream:
        num_positions = None

    return DatasetView(Rows("stream"), Stream(), "s")


def section(*sources, **keys):
    mix = tuple({"path": f"{n}.jsonl", **source} for n, source in enumerate(sources))
    return TrainingSourceSection(mix=mix, **keys)


def mix_of(sizes, sources, **keys):
    return mixed_view(pools(*sizes), section(*sources, **keys), seed=1, unit="samples")


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
    with refused(DataError, "data.train.mix.1.weight: 1e", "05", "10000"):
        mix_of([5, 5], [{"weight": 1.0}, {"weight": 0.00001}])


def test_rows_and_epochs_make_a_pass():
    by_rows = mix_of([50, 20], [{"rows": 30}, {"rows": 45}])
    assert (by_rows.order.num_positions, shares(by_rows, 75)) == (75, [30, 45])
    by_epochs = mix_of([50, 20], [{"epochs": 0.5}, {"epochs": 2}])
    assert (by_epochs.order.num_positions, shares(by_epochs, 65)) == (65, [25, 40])


def test_epochs_of_a_stream_and_less_than_a_sample_are_refused():
    with refused(DataError, "data.train.mix.1.epochs"):
        mix_of([5, 0], [{"epochs": 1}, {"epochs": 1}])
    with refused(DataError, "data.train.mix.0.epochs: 0.01"):
        mix_of([5, 5], [{"epochs": 0.01}, {"epochs": 1}])


def test_a_sample_is_found_by_its_id_and_keeps_it():
    pool = mix_of([5, 7], [{"weight": 1}, {"weight": 1}])
    sample_id = source_offset(1) + 3
    assert pool.samples[sample_id].sample_id == sample_id
    assert pool.samples[sample_id].arrays["input_ids"].tolist() == [3, 3, 3, 3]
    assert pool.samples.location(sample_id) == "1.jsonl, row 4"
    assert pool.samples.lengths_of(np.array([2, sample_id, 0])).tolist() == [3, 4, 1]


def test_the_share_of_each_source_in_the_run_is_logged():
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
