"""The loop: take a step, advance the progress, then log, evaluate, save and stop, each when it is due."""

import time

from finetune.report.events import StepSkipped
from finetune.runtime.progress import Progress
from finetune.train.parts import Parts
from finetune.train.step import LOSS_SCALE, Taken, take_step

FINISHED, EARLY = "finished", "early stopping"


def train(parts: Parts, progress: Progress) -> str:
    """Train from `progress` to the end of the plan and return why it ended. Collective."""
    if parts.early_stopping.is_over(progress):
        return EARLY
    groups = parts.groups(first_step=progress.step)
    while progress.step < parts.plan.num_steps:
        waited = time.perf_counter()
        group = next(groups)
        taken = take_step(parts, group, progress=progress, data_seconds=time.perf_counter() - waited)
        advance(progress, taken)
        parts.meters.add(progress.step, taken.record)
        if taken.skipped is not None:
            parts.reporter(StepSkipped(progress.step, taken.skipped, taken.sample_ids))
        reason = taken.stop_reason or ("stop_after_steps" if progress.step == parts.stop_after_steps else None)
        is_evaluated = parts.evaluate_due.due(progress.step)
        if parts.log_due.due(progress.step) or is_evaluated or reason:
            parts.report_steps()
        if is_evaluated:
            progress.last_metrics = parts.evaluate(progress.step)
            parts.early_stopping.note(progress.last_metrics, progress)
            reason = reason or (EARLY if parts.early_stopping.is_over(progress) else None)
        if parts.save_due.due(progress.step) or reason:
            parts.save(progress)
        if reason and progress.step < parts.plan.num_steps:
            return reason
    return FINISHED


def advance(progress: Progress, taken: Taken) -> None:
    """Count the step; the only place where the progress grows."""
    progress.step += 1
    progress.num_tokens += taken.record.num_tokens
    progress.num_targets += taken.record.num_targets
    progress.seconds += taken.record.seconds
    if taken.skipped == LOSS_SCALE:
        progress.num_scale_skips += 1
    elif taken.skipped is not None:
        progress.num_nonfinite_skips += 1
