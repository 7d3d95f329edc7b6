"""A run of `finetune` whose live bytes are counted: FOLDER and the words of the command line.

Each rank writes FOLDER/N.json with the peak of each step: of all tensors that there are, weights and optimizer too. On
a GPU it is what torch has allocated.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from finetune.__main__ import main
from finetune.memory.tracer import LiveBytes
from finetune.run import train as run
from finetune.train import loop


class LiveRun:
    """Counts from the building of the model on."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.environ.get('RANK', '0')}.json"
        self._build, self._take_step = run.build, loop.take_step
        self._live, self._peaks = LiveBytes(), []

    def build(self, *values: Any, **named: Any) -> Any:
        if not torch.cuda.is_available():
            self._live.__enter__()
        return self._build(*values, **named)

    def take_step(self, *values: Any, **named: Any) -> Any:
        has_device = torch.cuda.is_available()
        if has_device:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._live.peak = self._live.now
        record = self._take_step(*values, **named)
        self._peaks.append(torch.cuda.max_memory_allocated() if has_device else self._live.peak)
        self._path.write_text(json.dumps(self._peaks))
        return record


if __name__ == "__main__":
    torch.set_num_threads(1)
    live = LiveRun(Path(sys.argv[1]))
    del sys.argv[1]
    with patch.object(run, "build", live.build), patch.object(loop, "take_step", live.take_step):
        main()
