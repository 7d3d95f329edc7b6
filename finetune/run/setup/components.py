"""The components of the training loop: batches, update, evaluation, stop sources, and the times of the start."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from finetune.checkpoint.write.saver import Saver
from finetune.config.plugins import used_entries
from finetune.config.run_config import RunConfig
from finetune.data.batch import Batch
from finetune.data.loader import StepLoader, train_loader
from finetune.data.token_cache.integrity import SampleVerifier
from finetune.errors import RegistryError
from finetune.model.batch_norm import GhostBatchNorm, update_running_statistics
from finetune.report.events import Noted, StartedUp
from finetune.report.gpu import DeviceColumns
from finetune.report.reporter import CallbackReporter, Reporter, RunLog
from finetune.report.timing import StartupTimer
from finetune.run.context import RunPaths
from finetune.run.setup.build import BuiltRun
from finetune.run.setup.evaluator import make_evaluation
from finetune.run.setup.samples import open_sample_record
from finetune.runtime import distributed
from finetune.runtime.optional import no_op
from finetune.runtime.parallel import sequence_group, tensor_group
from finetune.runtime.progress import Cadence, NeverDue
from finetune.runtime.supervision.signals import ReceivedSignals, SpotNotice
from finetune.train.accelerator import own_batches
from finetune.train.components import TrainingComponents
from finetune.train.layer_outputs import RECORDED_STEPS, RecordedTask
from finetune.train.meters import Meters
from finetune.train.stopping import (
    FAILED_SAVE,
    SPOT_NOTICE,
    STOP_FILE,
    TIME_LIMIT,
    EarlyStopping,
    StopFile,
    StopSources,
)
from finetune.train.update import Update, UpdateInBackward


def make_components(
    config: RunConfig,
    built: BuiltRun,
    *,
    reporter: CallbackReporter,
    save: Saver,
    signals: ReceivedSignals,
    startup: StartupTimer,
    gpu: DeviceColumns,
    log: RunLog,
) -> TrainingComponents:
    """Return the loop's components; the first step reports the duration of the start. Collective."""
    _require_same_on_all_ranks(config, built)
    training_data, prepared, plan = built.training_data, built.prepared, built.plan
    stops: dict[str, Callable[[], bool]] = {FAILED_SAVE: lambda: save.has_failed}  # of this rank
    if config.train.time_limit_minutes:
        ends_at = startup.started_at + config.train.time_limit_minutes * 60
        stops[TIME_LIMIT] = lambda: time.monotonic() >= ends_at
    if distributed.is_main():
        stops[STOP_FILE] = StopFile(RunPaths(Path(config.run.folder)).stop_file)
    if config.run.spot_notice and os.environ.get("LOCAL_RANK", "0") == "0":  # one process of a machine
        stops[SPOT_NOTICE] = notice = SpotNotice(config.run.spot_notice, log=log)
        notice.start()
    if config.train.optimizer.in_backward:
        update: Update = UpdateInBackward(prepared.accelerator, prepared.model, prepared.optimizer)
    else:
        limit = config.train.max_gradient_norm
        update = Update(prepared.accelerator, prepared.model, prepared.optimizer, max_gradient_norm=limit)
    return TrainingComponents(
        accelerator=prepared.accelerator,
        model=prepared.model,
        optimizer=prepared.optimizer,
        task=built.step_task,
        groups=partial(_step_groups, config, built, startup=startup, report=reporter),
        plan=plan,
        sample_verifier=SampleVerifier(training_data.training, plan.global_batch_size),
        row_location=training_data.training.samples.location,
        seed=config.run.seed,
        update=update,
        nonfinite=config.train.nonfinite,
        scales_loss=config.train.precision == "fp16",
        meters=Meters(built.step_task.step_metrics, device=gpu),
        reporter=reporter,
        evaluate=make_evaluation(config, built, reporter=reporter),
        save=save,
        log_due=Cadence(config.report.log_every_steps, plan.num_steps),
        evaluate_due=Cadence(config.evaluate.every_steps, plan.num_steps) if config.evaluate else NeverDue(),
        save_due=Cadence(config.checkpoint.every_steps, plan.num_steps),
        stop_sources=StopSources(signals, stops, requests=reporter.take_requests),
        stop_after_steps=config.train.stop_after_steps,
        early_stopping=EarlyStopping(config.train.early_stopping),
        before_batch=prepared.before_batch,
        reduces_every_microbatch=prepared.reduces_every_microbatch,
        counts_ahead=not _has_ghost_norms(prepared.model),
    )


def _step_groups(
    config: RunConfig, built: BuiltRun, *, startup: StartupTimer, report: Reporter, first_step: int
) -> Iterator[tuple[Batch, ...]]:
    """Return this rank's microbatches, a group per step; the end of the first step ends the start of the run."""
    startup.end("run folder")
    training_data, prepared, plan = built.training_data, built.prepared, built.plan
    loader = train_loader(
        training_data.training,
        training_data.task.collate,
        global_batch_size=plan.global_batch_size,
        microbatch_size=plan.microbatch_size,
        first_step=first_step,
        num_steps=plan.num_steps,
        section=config.data,
        seed=config.run.seed,
        cost=training_data.task.samples.loading_cost,
        has_partners=training_data.task.samples.has_partners,
    )
    has_ghost_norms = _has_ghost_norms(prepared.model)

    def end_step(step: int) -> None:
        if step == first_step + 1:
            startup.end("first step")
            report(
                StartedUp(
                    step=step,
                    seconds={phase.name: phase.seconds for phase in startup.phases},
                    cpu_seconds={phase.name: phase.cpu_seconds for phase in startup.phases},
                    memory_bytes={phase.name: phase.memory_bytes for phase in startup.phases},
                )
            )
        if step == first_step + 2 and prepared.memory is not None:
            # It is the first with activations and optimizer state at the same time.
            report(Noted(step, prepared.memory(plan).peak_line))
        if step == first_step + RECORDED_STEPS and isinstance(built.step_task, RecordedTask):
            built.step_task.stop()
        if has_ghost_norms:
            update_running_statistics(prepared.model)

    run_folder = Path(config.run.folder)
    on_group = open_sample_record(run_folder, first_step=first_step).add if config.report.sample_ids else no_op
    groups = StepLoader(
        own_batches(prepared.accelerator, loader),
        plan.num_batches,
        prepared.accelerator.device,
        sequence=sequence_group(),
        are_copies=tensor_group().index > 0,
        first_step=first_step,
        on_group=on_group,
        on_step_end=end_step,
    )
    return iter(groups)


def _has_ghost_norms(model: nn.Module) -> bool:
    """Return whether a recomputed forward pass would count again in a norm's statistics."""
    return any(isinstance(module, GhostBatchNorm) for module in model.modules())


_MAX_STEPS_COMPARED = 1_000


def _require_same_on_all_ranks(config: RunConfig, built: BuiltRun) -> None:
    """Raise RegistryError if plugins give ranks different rows, optimizers or learning rates.

    A schedule is asked for its rates here, so that an invalid one is refused before the first step. Collective for a
    job with plugins.
    """
    names = [entry.name for _, entry in used_entries(config)]
    if not names:
        return
    schedule, num_steps = built.plan.schedule, built.plan.num_steps
    compared = [*range(0, num_steps, -(-num_steps // _MAX_STEPS_COMPARED)), num_steps - 1]
    settings = [_settings(group) for group in built.prepared.optimizer.param_groups]
    facts = {
        "rows": [built.training_data.training.fingerprint, num_steps],
        "the settings of the optimizer": settings,
        "learning rates": [schedule.learning_rate(step) for step in compared],
    }
    for rank, of_rank in enumerate(of_ranks := distributed.gather_objects(facts)):
        for title, value in of_rank.items():
            if value != of_ranks[0][title]:
                raise RegistryError(
                    f"{title} on rank {rank} differ from rank 0's. A plugin must return the same on every rank: one "
                    f"of {', '.join(dict.fromkeys(names))} reads the rank, the time, the host or unseeded randomness."
                )


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter group that are no tensors."""
    return {name: value for name, value in group.items() if isinstance(value, str | int | float | tuple | None)}
