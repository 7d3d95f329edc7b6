"""Which source stands where is a function of seed and position, exact in every window."""

import numpy as np
import pytest

from finetune.data.order.mixture import MixedOrder
from finetune.data.order.order import SetOrder
from finetune.data.order.sample_ids import place_of, sources_of
from tests.data.order.test_set_order import made as packs


def orders(*sizes):
    return [SetOrder(seed=source, num_samples=size) for source, size in enumerate(sizes)]


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
        own = [place_of(i).within for i in ids.tolist() if place_of(i).source == source]
        assert own == order.samples(0, len(own)).tolist()


@pytest.mark.parametrize("counts", [[5, 3, 2], [700, 900, 20]])
def test_from_any_position_the_rest_is_the_same(counts):
    whole = mix([50, 20, 9], counts).samples(0, 4000)
    for start in range(0, 4000, 357):
        assert np.array_equal(mix([50, 20, 9], counts).samples(start, 4000), whole[start:])


def test_another_seed_is_another_order():
    assert mix([5, 5], [1, 1]).samples(0, 50).tolist() != mix([5, 5], [1, 1], seed=2).samples(0, 50).tolist()


def test_positions_that_hold_packs_stay_whole():
    order = MixedOrder([packs(seed=3), SetOrder(seed=1, num_samples=30)], [1, 2], seed=1, until="first")
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
    return {i for i in ids if place_of(i).source == source}


def test_without_weights_a_window_is_a_pass():
    assert mix([50, 20], [50, 40], until=None).num_positions == 90


def test_draws_are_counted_without_going_through_them():
    order = mix([50, 20, 9], [5, 3, 2])
    for num in (0, 1, 7, 1024, 3333):
        assert order.num_draws(num) == np.bincount(sources_of(order.samples(0, num)), minlength=3).tolist()


def test_a_mix_with_a_stream_has_no_known_end():
    class Stream:
        num_positions = None

    assert MixedOrder([Stream(), *orders(5)], [1, 1], seed=1, until="all").num_positions is None


def test_the_mix_is_the_same_on_every_machine_and_version():
    assert sources_of(mix([50, 20, 9], [5, 3, 2], seed=42).samples(0, 20)).tolist() == PINNED


PINNED = [1, 2, 0, 0, 2, 0, 1, 0, 1, 0, 0, 2, 1, 0, 0, 0, 0, 1, 2, 1]
