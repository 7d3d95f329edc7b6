"""The job's memory under many layouts, predicted by its symbolic step, and the largest microbatch that fits."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from finetune.errors import ModelError
from finetune.memory.layout import Layout, Prediction

Predict = Callable[[Layout], Prediction]

_SHARDED_PARTS = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Fit:
    """The largest microbatch that fits, with its prediction; 0 if not even one sample fits.

    `smallest` is the prediction with one sample.
    """

    microbatch_size: int
    smallest: Prediction
    largest: Prediction | None = None


class PlannedMemory:
    """The cached predictions of a job."""

    def __init__(self, predict: Predict, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._predict = predict
        self._clock = clock
        self._predictions: dict[Layout, Prediction] = {}
        self.seconds = 0.0

    def at(self, layout: Layout) -> Prediction:
        """Return the prediction for the layout; raises ModelError if it cannot be predicted."""
        if layout not in self._predictions:
            started = self._clock()
            self._predictions[layout] = self._predict(layout)
            self.seconds += self._clock() - started
        return self._predictions[layout]

    def peaks(self) -> Iterator[tuple[Layout, int]]:
        """Yield the predicted layouts with their peaks in bytes."""
        yield from ((layout, prediction.peak_bytes) for layout, prediction in self._predictions.items())

    def largest_fit(self, layout: Layout, *, usable_bytes: int, sizes: Sequence[int]) -> Fit:
        """Return the largest of the microbatch sizes (ascending, from 1) that fits, confirmed by a prediction at it.

        Above some size, memory grows linearly, so interpolation between a size that fits and one that does not finds
        the next size to try.
        """

        def at(size: int) -> Prediction:
            return self.at(replace(layout, microbatch_size=size))

        one, fits, fails = at(1), 0, len(sizes) - 1
        if one.peak_bytes > usable_bytes:
            return Fit(0, one)
        if at(sizes[fails]).peak_bytes <= usable_bytes:
            return Fit(sizes[fails], one, at(sizes[fails]))
        while fails - fits > 1:
            low, high = at(sizes[fits]).peak_bytes, at(sizes[fails]).peak_bytes
            estimate = sizes[fits] + (usable_bytes - low) / (high - low) * (sizes[fails] - sizes[fits])
            between = range(fits + 1, fails)
            tried = max((index for index in between if sizes[index] <= estimate), default=between[0])
            if at(sizes[tried]).peak_bytes <= usable_bytes:
                fits = tried
            else:
                fails = tried
        return Fit(sizes[fits], one, at(sizes[fits]))


def with_ranks(prediction: Prediction, *, ranks: int, others: int) -> Prediction:
    """Return the prediction for a rank under FSDP with `others` ranks, given that with `ranks`.

    >>> with_ranks(Prediction(11, {"weights": 8, "activations": 3}), ranks=2, others=8).peak_bytes
    5
    """
    parts = {
        name: round(size * ranks / others) if name in _SHARDED_PARTS else size
        for name, size in prediction.parts.items()
    }
    return replace(prediction, peak_bytes=sum(parts.values()), parts=parts)


def unpredictable(error: ModelError) -> str:
    """Return the reason why nothing can be predicted."""
    return str(error).splitlines()[0]
