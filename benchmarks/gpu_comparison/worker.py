"""One case in a process of its own: imports what it needs, says so, and waits until it may start.

python -m gpu_comparison.worker CASE.json    a line on stdin starts it; the last line on stdout is the record, as JSON
"""

import json
import os
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

from gpu_comparison import by_hand, ours, peers
from gpu_comparison.cases import UNFINISHED, Case, shortened
from gpu_comparison.documents import describe, documents, mean_length, write_tokenizer
from gpu_comparison.shapes import SHAPES, tiny
from gpu_comparison.step_timer import StepTimer


def main(path: Path) -> None:
    """Train the case; never returns."""
    spec = json.loads(path.read_text())
    case, folder = Case(**spec["case"]), Path(spec["folder"])
    speak = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    print("ready", file=speak, flush=True)
    sys.stdin.readline()

    def finish(record: dict[str, Any]) -> NoReturn:
        """Hand the record over and end at once: nothing is to be saved."""
        print(json.dumps(record), file=speak, flush=True)
        os._exit(0)

    try:
        _train(case, folder, StepTimer(torch.device(spec["device"]), finish), is_tiny=spec["tiny"])
        finish({"error": UNFINISHED})
    except BaseException as error:  # whatever it is, it is this case's result
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        finish({"error": f"{type(error).__name__}: {lines[0]}"})


def _train(case: Case, folder: Path, timer: StepTimer, *, is_tiny: bool) -> None:
    shape = SHAPES[case.shape]
    if is_tiny:
        shape, case = tiny(shape), shortened(case)
    if case.needs and find_spec(case.needs) is None:
        raise ModuleNotFoundError(f"{case.needs} is not installed")
    if timer.device.type == "cuda":
        device = torch.cuda.get_device_properties(0)
        if device.total_memory < case.least_gib * 2**30:
            raise MemoryError(f"the case asks for {case.least_gib:.0f} GiB of GPU memory")
    count = case.rows * case.steps * (2 if case.is_packed else 1)  # a pack holds about as many as there are rows
    rows = documents(count, length=case.length, varies=case.varies, vocabulary=shape.vocabulary)
    timer.facts |= {"lengths": describe(rows), "mean_length": mean_length(rows)}
    if case.competitor == "bare":
        by_hand.train(case, shape, rows, timer)
    elif case.competitor == "ours":
        ours.train(case, shape, rows, timer, folder=folder)
    else:
        write_tokenizer(folder, vocabulary=shape.vocabulary)
        peers.train(case, shape, rows, timer, folder=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
