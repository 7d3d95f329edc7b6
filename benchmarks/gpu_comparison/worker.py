"""One case of the GPU suite in a process of its own: imports what it needs, says so, and waits to be told to go.

gpu_worker.py CASE.json    a line on stdin starts it; the last line on stdout is the record, as JSON
"""

import json
import os
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

from contest.on_gpu import peers, plain, product
from contest.on_gpu.cases import UNFINISHED, Case, in_small
from contest.on_gpu.rows import describe, documents, mean_length, write_tokenizer
from contest.on_gpu.shapes import SHAPES, tiny
from contest.on_gpu.watch import Watch


def main(spec: Path) -> None:
    """Play the case; never returns."""
    told = json.loads(spec.read_text())
    case, folder = Case(**told["case"]), Path(told["folder"])
    speak = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    print("ready", file=speak, flush=True)
    sys.stdin.readline()

    def finish(record: dict[str, Any]) -> NoReturn:
        """Hand the record over and end at once: nothing is to be saved."""
        print(json.dumps(record), file=speak, flush=True)
        os._exit(0)

    try:
        _play(case, folder, Watch(torch.device(told["device"]), finish), is_tiny=told["tiny"])
        finish({"error": UNFINISHED})
    except BaseException as error:  # whatever it is, it is this case's result
        traceback.print_exc()
        lines = str(error).splitlines() or [""]
        finish({"error": f"{type(error).__name__}: {lines[0]}"})


def _play(case: Case, folder: Path, watch: Watch, *, is_tiny: bool) -> None:
    shape = SHAPES[case.shape]
    if is_tiny:
        shape, case = tiny(shape), in_small(case)
    if case.needs and find_spec(case.needs) is None:
        raise ModuleNotFoundError(f"{case.needs} is not installed")
    if watch.device.type == "cuda":
        device = torch.cuda.get_device_properties(0)
        if device.total_memory < case.least_gib * 2**30:
            raise MemoryError(f"the case asks for {case.least_gib:.0f} GiB of GPU memory")
    count = case.rows * case.steps * (2 if case.is_packed else 1)  # a pack holds about as many as there are rows
    rows = documents(count, length=case.length, varies=case.varies, vocabulary=shape.vocabulary)
    watch.facts |= {"lengths": describe(rows), "mean_length": mean_length(rows)}
    if case.contestant == "bare":
        plain.play(case, shape, rows, watch)
    elif case.contestant == "ours":
        product.play(case, shape, rows, watch, folder=folder)
    else:
        write_tokenizer(folder, vocabulary=shape.vocabulary)
        peers.play(case, shape, rows, watch, folder=folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
