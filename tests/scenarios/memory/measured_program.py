"""A run of `finetune`, measured from within: FOLDER and the words of the command line; each rank writes FOLDER/N.json.

Of each step: the most bytes of tensors over what there was when it began. Of the start: the most memory that this
process took for the model until rank 0 sends its values under FSDP2. Of the run: how often DDP sent rank 0's buffers.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import fsdp_utils
from torch.nn.parallel import DistributedDataParallel

from finetune.__main__ import main
from finetune.run.setup import build as run
from finetune.train import loop
from tests.live_bytes import peak_memory

ONLY_PREPARES = "MEASURED_PROGRAM_ONLY_PREPARES"
"""The variable with which the run ends when the model has been prepared."""


class Measured:
    """What was measured so far, written to the rank's file at every change."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.environ.get('RANK', '0')}.json"
        self._found: dict[str, Any] = {"step_bytes": [], "buffers_sent": 0}
        self._take_step, self._prepare = loop.take_step, run.prepare_model
        self._sync_buffers = DistributedDataParallel._sync_buffers
        self._send_values = fsdp_utils.fsdp2_load_full_state_dict
        self._rss = 0

    def take_step(self, parts: Any, *values: Any, **named: Any) -> Any:
        with peak_memory(parts.accelerator.device) as memory:
            record = self._take_step(parts, *values, **named)
        self._found["step_bytes"].append(memory.peak)
        self._write()
        return record

    def prepare_model(self, *values: Any, **named: Any) -> Any:
        _reset_peak_rss()
        self._rss = memory_bytes("VmRSS")
        prepared = self._prepare(*values, **named)
        self._found["buffers"] = sum(1 for _ in prepared.model.buffers())
        self._write()
        if ONLY_PREPARES in os.environ:
            torch.distributed.barrier()
            os._exit(0)
        return prepared

    def send_values(self, *values: Any, **named: Any) -> Any:
        self._found["bytes_without_values"] = memory_bytes("VmHWM") - self._rss
        return self._send_values(*values, **named)

    def sync_buffers(self, model: Any) -> None:
        self._found["buffers_sent"] += 1
        self._write()
        self._sync_buffers(model)

    def _write(self) -> None:
        self._path.write_text(json.dumps(self._found))


def memory_bytes(name: str) -> int:
    """Return a line of this process's status: VmRSS, resident now; VmHWM, the most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _reset_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = Measured(Path(sys.argv[1]))
    del sys.argv[1]
    with (
        patch.object(loop, "take_step", measured.take_step),
        patch.object(run, "prepare_model", measured.prepare_model),
        patch.object(fsdp_utils, "fsdp2_load_full_state_dict", measured.send_values),
        patch.object(DistributedDataParallel, "_sync_buffers", lambda model: measured.sync_buffers(model)),
    ):
        main()
