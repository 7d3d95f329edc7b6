"""The largest microbatch that fits, with as few predictions as that takes."""

import pytest

from finetune.commands.plan.memory import Memory, with_ranks
from finetune.run.symbolic.prediction import Layout, Prediction

LAYOUT = Layout("fsdp2", 8, "full", False, 1)


class Counted:
    """Predicts 10 bytes and so many more per sample, and notes what it was asked."""

    def __init__(self, *, each: float, bend: float = 0.0) -> None:
        self.asked: list[int] = []
        self._each, self._bend = each, bend

    def __call__(self, layout: Layout) -> Prediction:
        self.asked.append(layout.microbatch_size)
        size = 10 + self._each * layout.microbatch_size + self._bend * layout.microbatch_size**2
        return Prediction(round(size), {"activations": round(size)})


def test_the_line_through_one_and_two_is_confirmed_at_its_answer():
    """10 + 3 n <= 40: 10 samples."""
    predict = Counted(each=3)
    fit = Memory(predict).largest_fit(LAYOUT, usable_bytes=40, most=64, confirms=True)
    assert (fit.microbatch_size, fit.is_confirmed) == (10, True)
    assert predict.asked == [1, 2, 10]


def test_without_confirmation_the_line_is_what_is_told():
    predict = Counted(each=3)
    fit = Memory(predict).largest_fit(LAYOUT, usable_bytes=40, most=64, confirms=False)
    assert fit.largest is not None
    assert (fit.microbatch_size, fit.is_confirmed, fit.largest.peak_bytes) == (10, False, 40)
    assert predict.asked == [1, 2]


def test_where_the_line_is_too_good_a_smaller_size_is_tried():
    """10 + n + n^2 / 4 <= 40: 9 samples; the line through 1 and 2 says 17."""
    predict = Counted(each=1, bend=0.25)
    fit = Memory(predict).largest_fit(LAYOUT, usable_bytes=40, most=64, confirms=True)
    assert fit.largest is not None and fit.largest.peak_bytes <= 40
    assert 5 <= fit.microbatch_size <= 9


@pytest.mark.parametrize(("usable", "most", "size", "asked"), [(5, 64, 0, [1]), (14, 64, 1, [1, 2]), (99, 1, 1, [1])])
def test_the_ends_take_fewer_predictions(usable: int, most: int, size: int, asked: list[int]):
    predict = Counted(each=3)
    assert Memory(predict).largest_fit(LAYOUT, usable_bytes=usable, most=most, confirms=True).microbatch_size == size
    assert predict.asked == asked


def test_what_a_strategy_divides_is_divided_by_the_other_number_of_ranks():
    own = Prediction(16, {"weights": 8, "gradients": 4, "optimizer": 2, "activations": 2})
    assert with_ranks(own, "fsdp2", ranks=2, others=4).peak_bytes == 4 + 2 + 1 + 2
    assert with_ranks(own, "zero2", ranks=2, others=4).peak_bytes == 8 + 2 + 1 + 2
    assert with_ranks(own, "ddp", ranks=2, others=4) == own
