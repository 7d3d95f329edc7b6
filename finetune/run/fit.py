"""From the first step to the exported model: train, export, report the end."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from finetune.checkpoint.write.saver import SavedCheckpoint, Saver
from finetune.errors import CheckpointError, NonFiniteError
from finetune.model.batch_norm import sync_batch_norm
from finetune.registry.tasks import TASKS
from finetune.report.events import CheckpointSaved, Noted, RunEnded, RunStarted, Warned
from finetune.report.gpu import sampled_gpu
from finetune.report.phases import OPTIMIZER
from finetune.report.profile import StepProfile
from finetune.report.reporter import CallbackReporter, Reporter
from finetune.run.final_export import export_final
from finetune.run.setup.components import make_components
from finetune.run.setup.patches import device_price, peak_flops
from finetune.run.state.resume import RestoredRun, describe_exported, load_best
from finetune.run.supervision import Supervision
from finetune.runtime import distributed
from finetune.runtime.optional import no_op
from finetune.runtime.run_folder import PROFILE_FOLDER
from finetune.runtime.upstream import keep_freed_memory
from finetune.strategy.choose import describe_strategy
from finetune.train.components import TrainingComponents
from finetune.train.loop import report_steps, run_training_loop
from finetune.train.stopping import FINAL_REASONS, STOP_FILE, remove_stop_file
from finetune.train.upstream import replace_engine_step, without_accelerate_wrapper


@dataclass(frozen=True)
class TrainingOutcome:
    """Why training ended, and when it started (monotonic seconds)."""

    reason: str
    started: float


def fit(restored: RestoredRun, *, reporter: CallbackReporter, supervision: Supervision) -> TrainingOutcome:
    """Train to the end of the plan, or until a stop is requested. Collective."""
    context, progress, plan = restored.context, restored.progress, restored.built.plan
    config = context.config
    save = make_saver(restored, reporter=reporter, on_path=supervision.status.checkpoint)
    save.rehearse(num_saves=plan.num_due(config.checkpoint.every_steps, after=progress.step))
    with sampled_gpu(restored.built.prepared.accelerator.device, is_main=distributed.is_main()) as gpu:
        components = make_components(
            config,
            restored.built,
            reporter=reporter,
            save=save,
            signals=supervision.signals,
            startup=supervision.startup,
            gpu=gpu,
            log=context.log,
        )
        if (section := config.report.profile) is not None:
            profile = StepProfile(
                section,
                folder=context.paths.folder / PROFILE_FOLDER,
                reporter=components.reporter,
                device=components.accelerator.device,
                attach=partial(_timed_optimizer, components),
            )
            components = replace(components, profile=profile)
        reporter(run_started(restored, previous=supervision.status.previous))
        started = time.monotonic()
        supervision.status.run(progress, num_steps=plan.num_steps)
        if config.evaluate is not None and config.evaluate.at_start and progress.step == 0:
            with supervision.startup.phase("evaluation"):
                components.evaluate(progress.step)
        if components.accelerator.device.type == "cpu":
            keep_freed_memory()
        supervision.begin_training()
        try:
            return TrainingOutcome(run_training_loop(components, progress), started)
        except NonFiniteError:  # raised on every rank alike, so they can still communicate
            report_steps(components, progress)
            with suppress(CheckpointError):  # a save in progress was begun before the error
                components.save.wait_for_writes()
            raise


@contextmanager
def _timed_optimizer(components: TrainingComponents, profile: StepProfile) -> Iterator[None]:
    """Time the optimizer's steps inside a backward pass as its own phase: DeepSpeed's engine's, and `in_backward`."""
    with ExitStack() as stack:
        if hasattr(components.model, "zero_optimization_stage"):
            engine: Any = components.model
            step = engine.step

            def timed_step(*given: Any, **named: Any) -> Any:
                with profile.phase(OPTIMIZER):
                    return step(*given, **named)

            stack.enter_context(replace_engine_step(engine, timed_step))
        elif isinstance(optimizer := without_accelerate_wrapper(components.optimizer), torch.optim.Optimizer):
            running = ExitStack()
            before = optimizer.register_step_pre_hook(lambda *_: running.enter_context(profile.phase(OPTIMIZER)))
            after = optimizer.register_step_post_hook(lambda *_: running.close())
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield


def make_saver(restored: RestoredRun, *, reporter: Reporter, on_path: Callable[[str], None] = no_op) -> Saver:
    """Return what saves the run; it reports each checkpoint and calls `on_path` with its path."""

    def on_saved(saved: SavedCheckpoint) -> None:
        path = str(saved.path)
        reporter(CheckpointSaved(saved.step, path, saved.size_bytes, saved.seconds, saved.stall_seconds))
        on_path(path)

    return Saver(
        restored.context.paths.checkpoints,
        section=restored.context.config.checkpoint,
        access=restored.access,
        run=restored.fingerprint,
        on_saved=on_saved,
        warn=lambda step, message: reporter(Warned(step, message)),
        before_save=partial(sync_batch_norm, restored.built.prepared.model),
    )


def run_started(restored: RestoredRun, *, previous: Mapping[str, Any]) -> RunStarted:
    """Return the event with which a run begins; `previous` is what its status file said before this start."""
    config, plan, prepared = restored.context.config, restored.built.plan, restored.built.prepared
    return RunStarted(
        step=restored.progress.step,
        num_steps=plan.num_steps,
        strategy=describe_strategy(restored.context.strategy),
        arithmetic=plan.arithmetic,
        config=config.model_dump(),
        flops_per_token=prepared.flops_per_token,
        peak_flops_per_second=peak_flops(
            prepared.accelerator.device, precision=config.train.precision, world=plan.world
        ),
        previous=previous,
        device_price=device_price(prepared.accelerator.device, stated=config.report.price_per_device_hour),
        parameter_groups=prepared.parameter_groups,
    )


def finish_run(restored: RestoredRun, fitted: TrainingOutcome, *, reporter: Reporter, supervision: Supervision) -> int:
    """Export the model where the run is finished, report its end and return the exit code. Collective."""
    context, progress, is_final = restored.context, restored.progress, fitted.reason in FINAL_REASONS
    if is_final:
        best = partial(load_best, restored) if context.config.export.checkpoint == "best" else None
        export_final(context.loaded, restored.built, reporter, progress=progress, reason=fitted.reason, load_best=best)
        if distributed.is_main() and (line := describe_exported(context.config, progress)) is not None:
            reporter(Noted(progress.step, line))
    if fitted.reason == STOP_FILE and distributed.is_main():
        remove_stop_file(context.paths.stop_file, log=lambda text: reporter(Warned(progress.step, text)))
    code = supervision.end(fitted.reason)
    reporter(
        RunEnded(
            step=progress.step,
            reason=fitted.reason,
            seconds=time.monotonic() - fitted.started,
            metrics=progress.last_metrics,
            final_folder=str(context.paths.final) if is_final else None,
            talks=TASKS[context.config.task.name].can_chat,
        )
    )
    return code
