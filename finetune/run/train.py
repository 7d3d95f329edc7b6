"""A run from its config to its exit code: validate, prepare the data, build, restore, fit, finish.

Each phase takes what the one before it returned, so their order cannot change: `build` precomputes with the weights
that the run starts from, `restore` loads a checkpoint into what `build` returned, `fit` trains what was restored.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.config.load import LoadedConfig, with_local_folder
from finetune.config.plugins import activate_options
from finetune.errors import CheckpointError, DiskError, HubError, NonFiniteError
from finetune.registry.tasks import TASKS
from finetune.report.events import Noted, RunEnded, RunStarted, Warned
from finetune.report.gpu import sampled_gpu
from finetune.report.page.facts import InterruptionCosts
from finetune.report.phases import OPTIMIZER
from finetune.report.profile import StepProfile
from finetune.report.reporter import CallbackReporter, Reporter, RunLog
from finetune.report.timing import StartupTimer
from finetune.run.context import RunContext
from finetune.run.final_export import export_final, push_final
from finetune.run.microbatch_size import resolve_microbatch_size
from finetune.run.setup.accelerator import make_accelerator
from finetune.run.setup.build import RestoredRun, build
from finetune.run.setup.components import make_components
from finetune.run.setup.model_checks import CheckedJob, Stage, changes_config, check_model
from finetune.run.setup.patches import device_price, peak_flops
from finetune.run.setup.strategy import launched_strategy
from finetune.run.setup.training_data import prepare_data
from finetune.run.state.finished import RunResult, result_of_run
from finetune.run.state.resume import describe_exported, find_finished, load_best, restore
from finetune.run.state.run_folder import fetch_run_folder, open_run_folder
from finetune.run.state.upload import Uploader, make_uploader
from finetune.run.supervision import Supervision, model_code_errors, supervised_run
from finetune.runtime import distributed
from finetune.runtime.progress import Progress
from finetune.runtime.run_folder import PROFILE_FOLDER
from finetune.runtime.text.terminal import quiet_libraries
from finetune.runtime.upstream import keep_freed_memory
from finetune.strategy.choose import describe_strategy
from finetune.strategy.launch_file import is_set_by_accelerate
from finetune.strategy.protocol import Strategy
from finetune.train.loop import report_steps, run_training_loop
from finetune.train.step import TrainingComponents
from finetune.train.stopping import FINAL_REASONS, STOP_FILE, remove_stop_file
from finetune.train.upstream import replace_engine_step, without_accelerate_wrapper


def train_from_config(loaded: LoadedConfig, checksums: ChecksumPrefetch | None = None) -> int:
    """Train as the config says and return the exit code. Collective over all launched processes."""
    startup = StartupTimer.from_process_start()
    activate_options(loaded.config.plugin_options)
    context = validate(loaded)
    uploader = make_uploader(context.loaded)
    with supervised_run(context.loaded, startup, log=context.log) as supervision, model_code_errors():
        trained_code, _, _ = _train(context, supervision, uploader=uploader, checksums=checksums)

    def upload_rest(code: int) -> int:
        """Upload the remaining files when no other process waits for this one; return the exit code."""
        exit_code = 1
        try:
            code = uploader.finish(code)
            if code == 0:
                push_final(context.config)
            exit_code = code
        finally:
            supervision.on_end.run(exit_code)
        return code

    return distributed.shut_down(trained_code, afterwards=upload_rest)


def train_for_caller(
    loaded: LoadedConfig,
    checksums: ChecksumPrefetch | None = None,
    *,
    reporters: Sequence[Reporter] = (),
) -> RunResult:
    """Train as the config says, in a process that outlives the run, and return its result on all ranks. Collective.

    Rank 0 passes all events to the `reporters`. Raises the first error of all ranks on every rank; HubError where the
    run has ended well and its files were not uploaded. Call it within `isolated_run`.
    """
    startup = StartupTimer()
    context = validate(loaded)
    uploader = make_uploader(context.loaded)
    with (
        supervised_run(context.loaded, startup, log=context.log, outlives_run=True) as supervision,
        model_code_errors(),
    ):
        code, reason, progress = _train(
            context, supervision, uploader=uploader, checksums=checksums, reporters=reporters
        )
        result = distributed.run_on_rank_0(lambda: result_of_run(context.folder, reason=reason, progress=progress))
        distributed.wait_for_devices()
    if (missing := uploader.upload_rest()) is not None:
        raise HubError(missing)
    if code == 0:
        push_final(context.config)
    return result


def _train(
    context: RunContext,
    supervision: Supervision,
    *,
    uploader: Uploader,
    checksums: ChecksumPrefetch | None,
    reporters: Sequence[Reporter] = (),
) -> tuple[int, str, Progress]:
    """Return the exit code, why the run ended, and how far it has come. Collective."""
    config, log, startup = context.config, context.log, supervision.startup
    checksums = fetch_run_folder(context.loaded, checksums, log=log)
    validate_model(context.loaded, context.strategy, log=log, on_every_rank=supervision.process_exit.raises)
    data = prepare_data(context)
    startup.end("data")
    accelerator = make_accelerator(config, context.strategy, log=log)
    supervision.gather_peers()
    if finished := find_finished(config, context.strategy, data, log=log):
        code = supervision.end_finished(finished, num_steps=data.plan.num_steps)
        return code, finished.reason, finished.progress
    detect_hangs = partial(supervision.watchdog.detect_hangs, config.run.hang_after_seconds)
    built = build(context, data, accelerator=accelerator, startup=startup, on_model=detect_hangs)
    restored = restore(context, built, checksums)
    with startup.phase("longest batch"):
        restored = resolve_microbatch_size(restored)
    with _reporting(restored, supervision, uploader=uploader, reporters=reporters) as reporter:
        fitted = fit(restored, reporter=reporter, supervision=supervision)
        code = finish_run(restored, fitted, reporter=reporter, supervision=supervision)
    return code, fitted.reason, restored.progress


@contextmanager
def _reporting(
    restored: RestoredRun, supervision: Supervision, *, uploader: Uploader, reporters: Sequence[Reporter]
) -> Iterator[CallbackReporter]:
    """Write the run folder and yield what reports to it; log at the end what interruptions have cost. Collective."""
    context, config = restored.context, restored.context.config
    costs = InterruptionCosts(supervision.status.add, hours_stated=config.run.hours_between_interruptions)
    opened = open_run_folder(context.loaded, restored.built, costs=costs, log=context.log, reporters=reporters)
    watched = uploader.watch_reporter(opened)
    with closing(opened), uploader, supervision.recording_first_error(DiskError):
        yield CallbackReporter(watched, config.train.callbacks, can_evaluate=config.evaluate is not None)
    for line in costs.lines:
        context.log(line)


def restore_for_steps(
    context: RunContext, *, startup: StartupTimer, checksums: ChecksumPrefetch | None = None
) -> RestoredRun:
    """Return the run, built and restored, for a caller that takes its steps, perhaps over other rows. Collective."""
    with model_code_errors():
        validate_model(context.loaded, context.strategy, log=context.log)
        data = prepare_data(context)
        startup.end("data")
        accelerator = make_accelerator(context.config, context.strategy, log=context.log)
        built = build(context, data, accelerator=accelerator, startup=startup)
        return resolve_microbatch_size(restore(context, built, checksums, takes_other_rows=True))


def validate(loaded: LoadedConfig) -> RunContext:
    """Return the context of the run; raises ConfigError, StrategyError or ModelError, on every rank alike."""
    quiet_libraries(is_main=distributed.is_main())
    loaded = with_local_folder(loaded)
    context = RunContext(loaded, launched_strategy(loaded), RunLog(is_main=distributed.is_main()))
    strategy = context.strategy
    for line in check_model(CheckedJob(loaded, strategy), [Stage.JOB]):
        context.log(line)
    if distributed.world() > 1 and not is_set_by_accelerate(os.environ) and distributed.is_main():
        context.log(f"{strategy.name}: no accelerate file was given. --accelerate FILE chooses another strategy.")
    return context


def validate_model(loaded: LoadedConfig, strategy: Strategy, *, log: RunLog, on_every_rank: bool = False) -> None:
    """Raise an error where the values of `model.from_config` or `model.config` give no model.

    And where the model does not take the adapters or samples of that length, or lacks the routers that a key is about.
    On rank 0, with which all others exit, or on every rank: each raises it.
    """
    if not distributed.is_main() and not on_every_rank:
        return
    for line in check_model(CheckedJob(loaded, strategy, builds=changes_config(loaded.config.model)), [Stage.CONFIG]):
        log(line)


@dataclass(frozen=True)
class TrainingOutcome:
    """Why training ended, and when it started (monotonic seconds)."""

    reason: str
    started: float


def fit(restored: RestoredRun, *, reporter: CallbackReporter, supervision: Supervision) -> TrainingOutcome:
    """Train to the end of the plan, or until a stop is requested. Collective."""
    context, progress, plan = restored.context, restored.progress, restored.built.plan
    config = context.config
    with sampled_gpu(restored.built.prepared.accelerator.device, is_main=distributed.is_main()) as gpu:
        components = make_components(
            restored,
            reporter=reporter,
            startup=supervision.startup,
            signals=supervision.signals,
            gpu=gpu,
            on_path=supervision.status.checkpoint,
        )
        components.save.rehearse(num_saves=plan.num_due(config.checkpoint.every_steps, after=progress.step))
        if (section := config.report.profile) is not None:
            profile = StepProfile(
                section,
                folder=context.folder / PROFILE_FOLDER,
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
        remove_stop_file(context.stop_file, log=lambda text: reporter(Warned(progress.step, text)))
    code = supervision.end(fitted.reason)
    reporter(
        RunEnded(
            step=progress.step,
            reason=fitted.reason,
            seconds=time.monotonic() - fitted.started,
            metrics=progress.last_metrics,
            final_folder=str(context.final) if is_final else None,
            talks=TASKS[context.config.task.name].can_chat,
        )
    )
    return code
