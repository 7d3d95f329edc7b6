"""The order of a stream follows from the samples of each window alone, wherever it begins."""

import numpy as np

from finetune.config.sections.data import BatchingSection
from finetune.data.order.consumed import digest_of_ids
from finetune.data.order.order import SetOrder
from finetune.data.order.sample_ids import in_window
from finetune.data.order.set_order import set_order
from finetune.data.streams.order import StreamOrder

SIZES = [5, 0, 3, 7, 2]


class Arranged:
    """Windows of so many samples, over and over; remembers which were asked for."""

    def __init__(self, sizes=SIZES):
        self.sizes = sizes
        self.asked = []

    def __call__(self, window):
        self.asked.append(window)
        size = self.sizes[window % len(self.sizes)]
        return SetOrder(seed=window, num_samples=size) if size else None


def places(ids):
    return [in_window(each) for each in ids.tolist()]


def test_window_follows_window_and_each_sample_comes_once():
    ids = StreamOrder(Arranged()).samples(0, 17)
    windows = [window for window, _ in places(ids)]
    assert windows == [0] * 5 + [2] * 3 + [3] * 7 + [4] * 2
    for window, size in enumerate(SIZES):
        assert sorted(index for each, index in places(ids) if each == window) == list(range(size))


def test_it_can_be_taken_up_anywhere():
    whole = StreamOrder(Arranged()).samples(0, 60)
    for start in range(0, 60, 7):
        assert StreamOrder(Arranged()).samples(start, 60).tolist() == whole[start:].tolist()
    order = StreamOrder(Arranged())
    pieces = [order.samples(start, min(start + 4, 60)) for start in range(0, 60, 4)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    assert [piece.tolist() for piece in order.cut(3, 20, 8)] == [
        whole[3:11].tolist(),
        whole[11:19].tolist(),
        [whole[19]],
    ]


def test_no_window_is_asked_for_before_its_turn():
    arranged = Arranged()
    order = StreamOrder(arranged)
    order.samples(0, 5)
    assert arranged.asked == [0]
    order.samples(5, 6)
    assert arranged.asked == [0, 1, 2]
    assert order.num_positions is None


def test_what_was_consumed_can_be_worked_out_again():
    digest = digest_of_ids(StreamOrder(Arranged()), 6, global_batch_size=4)
    assert digest == digest_of_ids(StreamOrder(Arranged()), 6, global_batch_size=4)
    assert digest != digest_of_ids(StreamOrder(Arranged([5, 0, 3, 6, 2])), 6, global_batch_size=4)


def test_packs_stay_within_their_window():
    lengths = [np.array([5, 9, 3, 1, 7]), np.array([2, 2, 2, 8])]

    def arrange(window):
        batching = BatchingSection(by="packs", tokens=10)
        return set_order(lengths[window % 2], seed=window, shuffle=True, batching=batching, max_length=10)

    order = StreamOrder(arrange)
    packs = [places(pack) for pack in order.cut(0, 10, 1)]
    assert len(packs) == 10
    for pack in packs:
        assert len({window for window, _ in pack}) == 1
        assert sum(lengths[window % 2][index] for window, index in pack) <= 10
    ids = [place for pack in packs for place in pack]
    assert sorted(ids[:9]) == [(0, i) for i in range(5)] + [(1, i) for i in range(4)]
