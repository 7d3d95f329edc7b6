"""The loop: agree on stop requests, take a step, advance the progress; then evaluate, save and stop, each when due."""

import math
import time
from functools import partial

from finetune.report.events import Warned
from finetune.report.phases import EVALUATE, LOG, SAVE
from finetune.runtime.progress import Progress
from finetune.train.meters import StepRecord
from finetune.train.step import PrefetchedSteps, TrainingComponents, record_skipped_step, take_step
from finetune.train.stopping import EARLY_STOPPING, FINISHED


def run_training_loop(components: TrainingComponents, progress: Progress) -> str:
    """Train from `progress` to the end of the plan and return the reason of its end, after saving. Collective."""
    if components.early_stopping.is_over(progress):
        return EARLY_STOPPING
    components.profile.begin(progress.step)
    reason = _take_steps(components, progress)
    with components.profile.phase(SAVE):
        components.save.wait_for_writes()
    components.profile.end_training(progress.step)
    return reason


def advance(progress: Progress, record: StepRecord) -> None:
    """Count the step; the only place where the progress grows."""
    progress.step += 1
    progress.num_tokens += record.num_tokens
    progress.num_targets += record.num_targets
    progress.seconds += record.seconds
    progress.samples_sha256 = record.samples_sha256


def count_step(components: TrainingComponents, progress: Progress, record: StepRecord) -> None:
    """Count a step that was taken or skipped, in the progress and in the meters. Collective.

    Raises NonFiniteError as configured.
    """
    if record.is_taken is False:
        record_skipped_step(components, progress, record)
    advance(progress, record)
    components.meters.add(record)


def report_steps(components: TrainingComponents, progress: Progress) -> None:
    """Report the steps taken since the last time, after which it is known which of them were left out. Collective.

    Raises NonFiniteError as configured.
    """
    with components.profile.phase(LOG):
        for record, event in components.meters.read():
            if record.is_taken is None and not math.isfinite(event.gradient_norm):
                record_skipped_step(components, progress, record)
            components.reporter(event)
        components.update.mark_all_read()
        if warning := components.meters.warning():
            components.reporter(Warned(progress.step, warning))


def _take_steps(components: TrainingComponents, progress: Progress) -> str:
    saved_step = progress.step
    groups = PrefetchedSteps(components, first_step=progress.step)
    while progress.step < components.plan.num_steps:
        started = time.perf_counter()
        batches, counts, data_seconds = groups.take(progress.step)
        request = counts.stop_request
        if counts.has_news or request.stop_reason or request.evaluates:
            report_steps(components, progress)
        is_evaluated = request.evaluates and progress.metrics_step < progress.step
        ended = _evaluate(components, progress) if is_evaluated and not request.stop_reason else None
        if (request.saves or ended) and saved_step < progress.step:
            saved_step = _save(components, progress)
        if reason := request.stop_reason or ended:
            return reason
        record = take_step(
            components,
            batches,
            counts,
            progress=progress,
            started=started,
            data_seconds=data_seconds,
            before_last_backward=partial(groups.start_next_count, progress.step + 1, counts=counts),
        )
        count_step(components, progress, record)
        reason = "stop_after_steps" if progress.step == components.stop_after_steps else None
        is_evaluated = components.evaluate_due.due(progress.step)
        if components.log_due.due(progress.step) or is_evaluated or reason:
            report_steps(components, progress)
        ended = _evaluate(components, progress) if is_evaluated else None
        reason = reason or ended
        if components.save_due.due(progress.step) or reason:
            saved_step = _save(components, progress)
        with components.profile.phase(SAVE):
            components.save.report_written()
        components.profile.end_step(progress.step)
        if reason and progress.step < components.plan.num_steps:
            return reason
    return FINISHED


def _save(components: TrainingComponents, progress: Progress) -> int:
    """Save and return the step; the saved progress counts the skipped steps. Collective."""
    report_steps(components, progress)
    with components.profile.phase(SAVE):
        components.save(progress)
    return progress.step


def _evaluate(components: TrainingComponents, progress: Progress) -> str | None:
    """Evaluate; return why the run is to end by that, if it is. Collective."""
    with components.profile.phase(EVALUATE):
        progress.last_metrics, progress.metrics_step = components.evaluate(progress.step), progress.step
    components.early_stopping.update(progress.last_metrics, progress)
    return EARLY_STOPPING if components.early_stopping.is_over(progress) else None
