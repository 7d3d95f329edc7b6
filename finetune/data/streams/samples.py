"""The samples of a stream by id, read from whichever of its windows holds them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from finetune.data.features import Features
from finetune.data.order.sample_ids import in_window
from finetune.data.prepared.store import MOST_NAMED
from finetune.data.streams.folder import WindowRecord
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
        return self._recorded(sample_ids, lambda record: record.lengths, np.int64)

    def marks_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark (uint64) of each sample, which outlive the samples."""
        return self._recorded(sample_ids, lambda record: record.marks, np.uint64)

    def known_marks_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Return the mark of what is delivered with each sample beside its own arrays: of nothing."""
        return np.zeros(len(sample_ids), np.uint64)

    def problem(self) -> str | None:
        """Return None: a window is verified when it is opened."""
        return None

    def refuse(self, damaged: np.ndarray) -> tuple[str, ...]:
        """Return what is to be said of samples that were delivered damaged; their windows are prepared again."""
        places = "; ".join(self.place(sample_id) for sample_id in damaged[:MOST_NAMED].tolist())
        windows = sorted({in_window(sample_id)[0] for sample_id in damaged.tolist()})
        gone = [
            window for window in windows if self.windows.at_hand(window) is None
        ]  # a damaged one is set aside by it
        if gone:
            again = f"windows {', '.join(map(str, gone))} are set aside. The same command prepares them again and"
        else:
            again = "and on the disk it is intact: it was damaged in the memory of a process. The same command"
        return f"{places}: not what was prepared", f"{again} continues from the last checkpoint."

    def _recorded(
        self, sample_ids: np.ndarray, read: Callable[[WindowRecord], np.ndarray], dtype: type[np.generic]
    ) -> np.ndarray:
        places = [in_window(sample_id) for sample_id in sample_ids.tolist()]
        found = {window: read(self.windows.record(window)) for window in sorted({window for window, _ in places})}
        return np.array([found[window][index] for window, index in places], dtype)
