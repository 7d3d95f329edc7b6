"""The memory of the job under many layouts, by its own symbolic step, and the largest microbatch that fits."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from finetune.errors import ModelError
from finetune.run.symbolic.prediction import Layout, Prediction

Predict = Callable[[Layout], Prediction]

DIVIDED_PARTS: Mapping[str, tuple[str, ...]] = {
    "zero1": ("optimizer",),
    "zero2": ("optimizer", "gradients"),
    "fsdp2": ("optimizer", "gradients", "weights"),
    "zero3": ("optimizer", "gradients", "weights"),
}
"""Parts of a prediction that a strategy divides by the number of ranks."""

_MAX_TRIES = 4
"""Predictions at sizes below the one that the line through two smaller ones says would fit."""


@dataclass(frozen=True)
class Fit:
    """The largest microbatch with which a step fits, and what it takes; 0 where not even one sample does.

    `smallest` is the prediction with one sample. `is_confirmed` tells whether `largest` was predicted at that size
    rather than read off the line through two smaller ones.
    """

    microbatch_size: int
    smallest: Prediction
    largest: Prediction | None = None
    is_confirmed: bool = True


class Memory:
    """Predictions of one job, each made once."""

    def __init__(self, predict: Predict, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._predict = predict
        self._clock = clock
        self._found: dict[Layout, Prediction] = {}
        self.seconds = 0.0

    def at(self, layout: Layout) -> Prediction:
        """Return the prediction for the layout; raises ModelError where there is none."""
        if layout not in self._found:
            started = self._clock()
            self._found[layout] = self._predict(layout)
            self.seconds += self._clock() - started
        return self._found[layout]

    def largest_fit(self, layout: Layout, *, usable_bytes: int, most: int, confirms: bool) -> Fit:
        """Return the largest microbatch of at most `most` samples that fits: by a line, then by a prediction at it."""
        one = self.at(replace(layout, microbatch_size=1))
        if one.peak_bytes > usable_bytes:
            return Fit(0, one)
        if most == 1:
            return Fit(1, one, one)
        two = self.at(replace(layout, microbatch_size=2))
        if two.peak_bytes > usable_bytes:
            return Fit(1, one, one)
        each = max(1, two.peak_bytes - one.peak_bytes)
        size = min(most, 1 + (usable_bytes - one.peak_bytes) // each)
        if size == 2:
            return Fit(2, one, two)
        if not confirms:
            return Fit(size, one, on_line(one, two, size), is_confirmed=False)
        return self._confirmed(layout, size, usable_bytes=usable_bytes, one=one, two=two)

    def _confirmed(self, layout: Layout, size: int, *, usable_bytes: int, one: Prediction, two: Prediction) -> Fit:
        for _ in range(_MAX_TRIES):
            found = self.at(replace(layout, microbatch_size=size))
            if found.peak_bytes <= usable_bytes or size <= 2:
                return Fit(size, one, found)
            each = (found.peak_bytes - one.peak_bytes) / (size - 1)
            size = max(2, min(size - 1, 1 + int((usable_bytes - one.peak_bytes) / each)))
        return Fit(2, one, two)


def on_line(one: Prediction, two: Prediction, size: int) -> Prediction:
    """Return what `size` samples take, on the line through one and two.

    >>> on_line(Prediction(10, {"activations": 2}), Prediction(12, {"activations": 4}), 5).parts
    {'activations': 10}
    """
    steps = size - 1
    parts = {name: own + steps * (two.parts.get(name, 0) - own) for name, own in one.parts.items()}
    return replace(two, peak_bytes=one.peak_bytes + steps * (two.peak_bytes - one.peak_bytes), parts=parts)


def with_ranks(prediction: Prediction, strategy: str, *, ranks: int, others: int) -> Prediction:
    """Return what a rank takes with `others` ranks where it takes this with `ranks`: what is divided is so by more.

    >>> with_ranks(Prediction(11, {"weights": 8, "activations": 3}), "fsdp2", ranks=2, others=8).peak_bytes
    5
    """
    divided = DIVIDED_PARTS.get(strategy.removesuffix("_offload"), ())
    parts = {name: round(size * ranks / others) if name in divided else size for name, size in prediction.parts.items()}
    change = sum(parts.values()) - sum(prediction.parts.values())
    return replace(prediction, peak_bytes=prediction.peak_bytes + change, parts=parts)


def unpredictable(error: ModelError) -> str:
    """Return why there is no prediction, in one sentence."""
    return str(error).splitlines()[0]
