"""The largest microbatch that fits, with as few predictions as that takes."""

import pytest

from finetune.commands.plan.memory import PlannedMemory, with_ranks
from finetune.memory.layout import Layout, Prediction

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


SIZES = (1, 2, 4, 8, 16, 32, 64)


def test_the_largest_fitting_size_is_searched_by_linear_interpolation():
    """10 + 3 n <= 40: 10 samples, of the sizes 8; one step above it is tried, too."""
    predict = Counted(each=3)
    fit = PlannedMemory(predict).largest_fit(LAYOUT, usable_bytes=40, sizes=SIZES)
    assert fit.microbatch_size == 8 and fit.largest is not None and fit.largest.peak_bytes == 34
    assert predict.asked == [1, 64, 8, 16]


def test_the_largest_fitting_size_is_found_for_superlinear_memory():
    """10 + n + n^2 / 4 <= 40: 9 samples, of the sizes 8."""
    fit = PlannedMemory(Counted(each=1, bend=0.25)).largest_fit(LAYOUT, usable_bytes=40, sizes=SIZES)
    assert fit.microbatch_size == 8


@pytest.mark.parametrize(
    ("usable", "sizes", "size", "asked"),
    [(5, SIZES, 0, [1]), (999, SIZES, 64, [1, 64]), (14, (1, 2), 1, [1, 2]), (99, (1,), 1, [1])],
)
def test_the_ends_take_fewer_predictions(usable: int, sizes: tuple[int, ...], size: int, asked: list[int]):
    predict = Counted(each=3)
    assert PlannedMemory(predict).largest_fit(LAYOUT, usable_bytes=usable, sizes=sizes).microbatch_size == size
    assert predict.asked == asked


def test_sharded_parts_of_a_prediction_scale_with_the_number_of_ranks():
    own = Prediction(16, {"weights": 8, "gradients": 4, "optimizer": 2, "activations": 2})
    assert with_ranks(own, ranks=2, others=4).peak_bytes == 4 + 2 + 1 + 2
