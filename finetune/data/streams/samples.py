"""The samples of a stream by id, read from whichever of its windows holds them."""

from dataclasses import dataclass

import numpy as np

from finetune.data.features import Features
from finetune.data.order.sample_ids import in_window
from finetune.data.streams.windows import Windows


@dataclass(frozen=True)
class StreamSamples:
    """Encoded samples by id; where a window is not at hand any more, it waits until it has been prepared again."""

    windows: Windows

    def __getitem__(self, sample_id: int) -> Features:
        window, index = in_window(sample_id)
        return Features(self.windows.prepared(window)[index].arrays, sample_id)

    def place(self, sample_id: int) -> str:
        """Return where its row stands, as exactly as what is at hand can tell."""
        window, index = in_window(sample_id)
        prepared = self.windows.at_hand(window)
        if prepared is not None:
            return prepared.place(index)
        begins = self.windows.job.plan.place(self.windows.record(window).start)
        return f"sample {index} of window {window} (from {begins} on)"

    def lengths_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the tokens of each sample, which outlive the samples."""
        places = [in_window(sample_id) for sample_id in sample_ids.tolist()]
        lengths = {window: self.windows.record(window).lengths for window in sorted({window for window, _ in places})}
        return np.array([lengths[window][index] for window, index in places], np.int64)
