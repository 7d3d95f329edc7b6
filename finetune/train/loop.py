"""The loop: agree on what is wished, take a step, advance the progress; then evaluate, save and stop, each when due."""

import time

from finetune.report.events import StepSkipped
from finetune.runtime.progress import Progress
from finetune.runtime.waypoints import reach
from finetune.train.parts import Parts
from finetune.train.step import LOSS_SCALE, Taken, count, take_step

FINISHED, EARLY = "finished", "early stopping"


def train(parts: Parts, progress: Progress) -> str:
    """Train from `progress` to the end of the plan and return why it ended; by then it is saved. Collective."""
    if parts.early_stopping.is_over(progress):
        return EARLY
    reason = _take_steps(parts, progress)
    parts.save.settle()
    return reason


def advance(progress: Progress, taken: Taken) -> None:
    """Count the step; the only place where the progress grows."""
    progress.step += 1
    progress.num_tokens += taken.record.num_tokens
    progress.num_targets += taken.record.num_targets
    progress.seconds += taken.record.seconds
    progress.samples_sha256 = taken.record.samples_sha256
    if taken.skipped == LOSS_SCALE:
        progress.num_scale_skips += 1
    elif taken.skipped is not None:
        progress.num_nonfinite_skips += 1


def _take_steps(parts: Parts, progress: Progress) -> str:
    saved_step = progress.step
    groups = parts.groups(first_step=progress.step)
    while progress.step < parts.plan.num_steps:
        started = time.perf_counter()
        group = next(groups)
        data_seconds = time.perf_counter() - started
        reach("data", step=progress.step)
        counts = count(parts, group, step=progress.step)
        if counts.wish.saves and saved_step < progress.step:
            parts.save(progress)
            saved_step = progress.step
        if counts.wish.stop_reason:
            parts.report_steps()
            return counts.wish.stop_reason
        taken = take_step(parts, group, counts, progress=progress, started=started, data_seconds=data_seconds)
        advance(progress, taken)
        reason = _follow(parts, progress, taken)
        if parts.save_due.due(progress.step) or reason:
            parts.save(progress)
            saved_step = progress.step
        parts.save.tell()
        if reason and progress.step < parts.plan.num_steps:
            return reason
    return FINISHED


def _follow(parts: Parts, progress: Progress, taken: Taken) -> str | None:
    """Report the step and evaluate where it is due; return why the run is to end here, if it is. Collective."""
    parts.meters.add(progress.step, taken.record)
    if taken.skipped is not None:
        parts.reporter(StepSkipped(progress.step, taken.skipped, taken.sample_ids, taken.rows))
    reason = "stop_after_steps" if progress.step == parts.stop_after_steps else None
    is_evaluated = parts.evaluate_due.due(progress.step)
    if parts.log_due.due(progress.step) or is_evaluated or reason:
        parts.report_steps()
    if is_evaluated:
        progress.last_metrics, progress.metrics_step = parts.evaluate(progress.step), progress.step
        parts.early_stopping.note(progress.last_metrics, progress)
        reason = reason or (EARLY if parts.early_stopping.is_over(progress) else None)
    return reason
