"""Trains jobs one after another and writes of each what reached its head: `head_program.py SPEC.json`.

A spec is a list of `{"job": path, "overrides": [...], "vocabulary": n}`. Each rank leaves `head-RANK.json` in the run's
folder: of each call of the task the number of targets, of positions, and the rows of every forward pass; the rows of
the largest tensor as wide as the vocabulary; and the peak of the memory of the steps, in bytes.
"""

import gc
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from finetune.config.load import LoadedConfig, load_config
from finetune.data.batch import Batch
from finetune.run import train
from finetune.run.setup import build
from finetune.runtime import distributed
from finetune.task.causal_lm import TokenTask
from finetune.task.distillation import DistillationTask
from finetune.task.model_inputs import unwrap_model
from finetune.task.preference import KtoTask, PreferenceTask
from tests.live_bytes import LiveBytes
from tests.scenarios.trained import forget
from tests.task.lm_loss.head_rows import HeadRows
from tests.task_cases.worker import stay

TASKS = (TokenTask, DistillationTask, PreferenceTask, KtoTask)
CALLS = ("loss_sums", "metric_sums", "evaluate_batch", "prepare_step")


@dataclass
class Record:
    """What a rank has seen of a run."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    largest: int = 0
    peak_bytes: int = 0


class Spy(ExitStack):
    """Watches a run in this context."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.record = Record()
        self._rows, self._live = HeadRows(vocabulary), LiveBytes()
        self._depth = 0

    def __enter__(self) -> "Spy":
        super().__enter__()
        for kind in TASKS:
            for name in CALLS:
                if name in vars(kind):
                    self.enter_context(patch.object(kind, name, self._watched(vars(kind)[name])))
        self.enter_context(patch.object(build, "prepare_model", self._preparing(build.prepare_model)))
        self.enter_context(patch.object(train, "finish_run", self._finishing(train.finish_run)))
        self.enter_context(patch.object(distributed, "shut_down", stay))
        self.enter_context(self._rows)
        if not torch.cuda.is_available():
            self.enter_context(self._live)
        return self

    def _preparing(self, prepare_model: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(*values: Any, **named: Any) -> Any:
            prepared = prepare_model(*values, **named)
            self.enter_context(self._rows.watch(unwrap_model(prepared.model)))
            self._live.peak = self._live.now
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            return prepared

        return prepare

    def _finishing(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        def finish_after(*values: Any, **named: Any) -> Any:
            on_gpu = torch.cuda.is_available()
            self.record.peak_bytes = torch.cuda.max_memory_allocated() if on_gpu else self._live.peak
            return finish(*values, **named)

        return finish_after

    def _watched(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(task: Any, model: Any, batches: Any) -> Any:
            first, is_outer, self._rows.largest = len(self._rows.forwards), not self._depth, 0
            self._depth += 1
            try:
                return own(task, model, batches)
            finally:
                self._depth -= 1
                if is_outer:
                    self._note(batches, self._rows.forwards[first:])

        return call

    def _note(self, batches: Any, rows: list[int]) -> None:
        listed = [batches] if isinstance(batches, Batch) else list(batches)
        targets = sum(len(each.targets.labels) for each in listed)
        positions = sum(each.labels.numel() for each in listed)
        largest = self._rows.largest
        self.record.calls.append({"targets": targets, "positions": positions, "rows": rows, "largest": largest})


def run(loaded: LoadedConfig, *, vocabulary: int) -> Record:
    with Spy(vocabulary) as spy:
        train.train_from_config(loaded)
    return spy.record


def main(spec: str) -> None:
    for each in json.loads(Path(spec).read_text()):
        loaded = load_config(Path(each["job"]), each["overrides"])
        record = run(loaded, vocabulary=each["vocabulary"])
        path = Path(loaded.config.run.folder) / f"head-{distributed.rank()}.json"
        path.write_text(json.dumps(asdict(record)))
        forget()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    distributed.shut_down(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
