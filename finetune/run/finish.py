"""From the first step to what the run leaves behind."""

import time
from contextlib import suppress
from pathlib import Path

from finetune.config.load import LoadedConfig
from finetune.errors import CheckpointError, NonFiniteError
from finetune.report.events import RunEnded, Warned
from finetune.run.final import export_final
from finetune.run.lessons import Lessons
from finetune.run.machine import Machine
from finetune.run.over import FinishedRun
from finetune.run.watch import Watch
from finetune.run.wishes import take_back_stop
from finetune.runtime import ranks, signals, status
from finetune.runtime.progress import Progress
from finetune.train.early_stopping import EARLY, FINISHED
from finetune.train.loop import report_steps, train
from finetune.train.parts import Parts
from finetune.train.stopping import FAILED_SAVE, SPOT_NOTICE, STOP_FILE

EXPORTED_AFTER = (FINISHED, EARLY)
"""Why a run may end so that its model is final; after a signal or a limit it is to be continued."""

TALKING = ("causal_lm", "image_text_to_text")
"""Heads of models that `finetune chat` can talk to."""

EXIT_CODES = {**signals.EXIT_CODES, SPOT_NOTICE: 143, FAILED_SAVE: 1}
"""Every other end is a success; a machine that is taken away is to be replaced, as after SIGTERM."""


def train_to_the_end(
    loaded: LoadedConfig, parts: Parts, *, progress: Progress, lessons: Lessons, machine: Machine, watch: Watch
) -> int:
    """Train, export the model where the run is over, report the end and return the exit code. Collective."""
    started, folder = time.monotonic(), Path(loaded.config.run.folder)
    watch.status.run(progress, num_steps=parts.plan.num_steps)
    section = loaded.config.evaluate
    if section is not None and section.at_start and progress.step == 0:
        parts.evaluate(progress.step)
    reason = _train(parts, progress, watch=watch)
    is_final = reason in EXPORTED_AFTER
    if is_final:
        export_final(loaded, parts.reporter, progress=progress, lessons=lessons, machine=machine, reason=reason)
    code = EXIT_CODES.get(reason, 0)
    if reason == STOP_FILE and ranks.is_main():
        take_back_stop(folder, say=lambda text: parts.reporter(Warned(progress.step, text)))  # it has been obeyed
    watch.status.end(status.FINISHED if is_final else status.STOPPED, reason=reason, exit_code=code)
    parts.reporter(
        RunEnded(
            step=progress.step,
            reason=reason,
            seconds=time.monotonic() - started,
            metrics=progress.last_metrics,
            final_folder=str(folder / "final") if is_final else None,
            talks=parts.task.head in TALKING,
        )
    )
    return code


def end_at_once(finished: FinishedRun, *, watch: Watch, num_steps: int) -> int:
    """Report that there is nothing left to do, and return the exit code of a success."""
    place, reason = str(finished.checkpoint), finished.reason
    return status.told_finished(watch.status, finished.progress, place, reason, num_steps=num_steps)


def _train(parts: Parts, progress: Progress, *, watch: Watch) -> str:
    watch.watchdog.begin_training()
    try:
        return train(parts, progress)
    except NonFiniteError:  # raised on every rank alike, so they can still speak
        report_steps(parts, progress)
        with suppress(CheckpointError):  # what is being written was taken before
            parts.save.settle()
        raise
