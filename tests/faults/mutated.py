"""`python -m tests.faults.mutated WORDS`: finetune with a planted bug, by which the harness shows that it can fail.

FINETUNE_FAULTS_MUTANT names the bug. Each is one that a change to the product may bring: nothing crashes at once.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from finetune.__main__ import main
from finetune.checkpoint.read import load
from finetune.checkpoint.write import writer
from finetune.data import loader
from finetune.report.events import JsonlReporter
from finetune.runtime import seeds

VARIABLE = "FINETUNE_FAULTS_MUTANT"


def skip_verification() -> None:
    """Damaged files pass for whole ones."""
    load.first_file_problem = lambda *_, **__: None  # type: ignore[assignment]


def shift_samples() -> None:
    """A resumed run continues one step further in the data."""
    build = loader.TrainSampler.__init__

    def shifted(self: Any, order: Any, *, first_step: int, num_steps: int, **sizes: int) -> None:
        later = int(first_step > 0)
        build(self, order, first_step=first_step + later, num_steps=num_steps + later, **sizes)

    loader.TrainSampler.__init__ = shifted  # type: ignore[assignment]


def leave_a_process() -> None:
    """Something that the run has started outlives it."""
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def rename_early() -> None:
    """A checkpoint has its final name before its manifest is written."""
    commit, pass_point = writer._commit, writer.fault_point
    staged: list[Path] = []

    def noted(staging: Path, *values: Any, **named: Any) -> Any:
        staged[:] = [staging]
        return commit(staging, *values, **named)

    def renamed(point: str, **named: Any) -> None:
        if point != "save.manifest":
            pass_point(point, **named)
            return
        (staging,) = staged
        final = writer.layout.step_folder(staging.parent, named["step"])
        staging.rename(final)
        pass_point(point, **named)
        final.rename(staging)

    writer._commit, writer.fault_point = noted, renamed


def seed_once() -> None:
    """Random numbers of a step depend on how many steps this launch has taken."""
    seed, count = seeds.seed_everything, [0]

    def counted(*parts: int | str) -> None:
        count[0] += 1
        seed(*parts[:1], count[0])

    seeds.seed_everything = counted


def forget_a_step() -> None:
    """One step is missing from the log."""
    write = JsonlReporter.__call__
    seen: list[int] = []

    def forgetful(self: Any, event: Any) -> None:
        if type(event).__name__ == "StepTaken" and event.step > 12 and not seen:
            seen.append(event.step)
            return
        write(self, event)

    JsonlReporter.__call__ = forgetful  # type: ignore[method-assign]


MUTANTS = (skip_verification, shift_samples, leave_a_process, rename_early, seed_once, forget_a_step)

if __name__ == "__main__":
    next(mutant for mutant in MUTANTS if mutant.__name__ == os.environ[VARIABLE])()
    sys.argv[0] = "finetune"
    main()
