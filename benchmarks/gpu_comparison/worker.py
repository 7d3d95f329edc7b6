"""One case in a process of its own: imports what it needs, says so, and waits until it may start.

python -m gpu_comparison.worker CASE.json    "go" on stdin starts it; the last line on stdout is the record, as JSON

It ends when stdin is closed, before or after that line: nobody is there any more to read what it finds.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpu_comparison.cases import UNFINISHED, Case, shortened
from gpu_comparison.documents import describe, documents, mean_length
from gpu_comparison.shapes import SHAPES, tiny
from gpu_comparison.step_timer import StepTimer
from gpu_comparison.turns import connected, wait_for_turn

MODULES = {"ours": "ours", "bare": "by_hand", "trainer": "peers", "trl": "peers"}


def main(path: Path) -> None:
    """Measure the case; never returns."""
    spec = json.loads(path.read_text())
    case, folder = Case(**spec["case"]), Path(spec["folder"])
    listen, speak = connected()
    import_module(f"gpu_comparison.{MODULES[case.competitor]}")
    wait_for_turn(listen, speak)

    def finish(record: dict[str, Any]) -> NoReturn:
        """Hand the record over and end at once: nothing is to be saved."""
        print(json.dumps(record), file=speak, flush=True)
        os._exit(0)

    try:
        _measure(case, folder, StepTimer(torch.device(spec["device"]), finish), is_tiny=spec["tiny"])
        finish({"error": UNFINISHED})
    except BaseException as error:  # whatever it is, it is this case's result
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        finish({"error": f"{type(error).__name__}: {lines[0]}"})


def _measure(case: Case, folder: Path, timer: StepTimer, *, is_tiny: bool) -> None:
    shape = SHAPES[case.shape]
    if is_tiny:
        shape, case = tiny(shape), shortened(case)
    if timer.device.type == "cuda" and torch.cuda.get_device_properties(0).total_memory < case.least_gib * 2**30:
        raise MemoryError(f"the case asks for {case.least_gib:.0f} GiB of GPU memory")
    count = case.rows * case.steps * (2 if case.is_packed else 1)  # a pack holds about as many as there are rows
    rows = documents(count, length=case.length, varies=case.varies, vocabulary=shape.vocabulary)
    timer.facts |= {"lengths": describe(rows), "mean_length": mean_length(rows)}
    import_module(f"gpu_comparison.{MODULES[case.competitor]}").train(case, shape, rows, timer, folder=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
