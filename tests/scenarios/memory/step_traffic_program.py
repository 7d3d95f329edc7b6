"""Run by the ranks of a launch: train a job, and write what its third step sends and copies, of every rank.

python -m tests.scenarios.memory.step_traffic_program OUT JOB OVERRIDE...
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config.load import load_config
from finetune.run.train import train_from_config
from finetune.runtime import distributed
from finetune.train import loop

STEP = 2


class Traffic(TorchDispatchMode):
    """Counts collectives and copies by their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.joined: Counter[int] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        result = operation(*given, **(named or {}))
        if operation.namespace == "c10d":
            tensor = next(torch.utils._pytree.tree_iter(given))
            kind = operation.name().removeprefix("c10d::").strip("_")
            self.sent[f"{kind} {tensor.dtype} {tensor.nbytes}"] += 1
        elif operation.name() == "aten::cat":
            self.joined[result.nbytes] += 1
        return result


def main(out: Path, job: Path, overrides: list[str]) -> None:
    of_loop = loop.take_step
    traffic = Traffic()

    def taking(parts: Any, group: Any, *rest: Any, progress: Any, **named: Any) -> Any:
        if progress.step != STEP:
            return of_loop(parts, group, *rest, progress=progress, **named)
        with traffic:
            record = of_loop(parts, group, *rest, progress=progress, **named)
        trained = sum(each.numel() for each in parts.model.parameters() if each.requires_grad)
        found = {"trained": trained, "sent": traffic.sent, "joined": traffic.joined}
        out.with_name(f"{out.name}{distributed.rank()}.json").write_text(json.dumps(found))
        return record

    with patch.object(loop, "take_step", taking):
        train_from_config(load_config(job, overrides))


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
