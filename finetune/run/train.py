"""A run from its config to its exit code: validate, prepare the data, build, restore, fit, finish."""

import os
import time
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.config.load import LoadedConfig, require_divisible_batch
from finetune.config.rules.model import adapter_of, trained_dtypes
from finetune.data.token_cache.cache import cache_folder
from finetune.errors import CheckpointError, DiskError, NonFiniteError
from finetune.model.batch_norm import sync_batch_norm
from finetune.report.events import RunEnded, RunStarted, Warned
from finetune.report.run_log import RunLog
from finetune.report.timing import StartUp
from finetune.run.build.data import TrainingData, make_run_plan, make_training_data, verify_before_training
from finetune.run.build.loop import make_parts, make_stop_sources, remove_stop_file, report_startup
from finetune.run.build.model import require_from_config_buildable
from finetune.run.build.precompute import precompute
from finetune.run.build.prepared_model import PreparedModel, make_accelerator, prepare_model, require_sample_isolation
from finetune.run.build.strategy import require_supported_by_strategy
from finetune.run.build.teacher import attach_teacher
from finetune.run.final_export import export_final, push_final, require_mergeable
from finetune.run.remote.background import Uploader, make_uploader
from finetune.run.remote.download import download_run, with_local_folder
from finetune.run.state.finished import FinishedRun
from finetune.run.state.preflight import prefetch_checksums
from finetune.run.state.resume import find_finished, resume_run
from finetune.run.state.run_folder import open_run_folder, remove_leftovers
from finetune.run.state.save import ReportingSaver
from finetune.run.supervision import Supervision, supervised_run
from finetune.runtime import distributed
from finetune.runtime.progress import Progress
from finetune.runtime.supervision import signals, status
from finetune.runtime.text.library_output import quiet_libraries
from finetune.strategy.choose import choose_strategy, describe_strategy
from finetune.strategy.environment import read_environment
from finetune.strategy.protocol import Strategy
from finetune.strategy.reconcile import JobSettings
from finetune.train.early_stopping import EARLY_STOPPING, FINISHED
from finetune.train.loop import report_steps, train
from finetune.train.optim.optimizers import uses_low_bit_adamw
from finetune.train.parts import Parts
from finetune.train.stopping import FAILED_SAVE, SPOT_NOTICE, STOP_FILE


def train_from_config(loaded: LoadedConfig, checksums: ChecksumPrefetch | None = None) -> int:
    """Train as the config says and return the exit code. Collective over all launched processes.

    `ahead` is what `prefetch_checksums` has begun.
    """
    startup, say = StartUp.of_process(), RunLog(is_main=distributed.is_main())
    loaded = with_local_folder(loaded)
    quiet_libraries(is_main=distributed.is_main())
    strategy = launched_strategy(loaded)
    require_supported_by_strategy(loaded.config, strategy.name)
    mirror = make_uploader(loaded)
    with supervised_run(Path(loaded.config.run.folder), log=say, also=(cache_folder(loaded.config.data),)) as watch:
        if distributed.is_main():
            remove_leftovers(loaded.config, log=say)
        download_run(loaded, log=print)
        checksums = checksums or prefetch_checksums(loaded)
        require_from_config_buildable(loaded.config)
        code = _train(
            loaded, strategy, supervision=watch, uploader=mirror, startup=startup, checksums=checksums, log=say
        )
    return distributed.shut_down(code, afterwards=partial(_hand_over, loaded, mirror))


def _hand_over(loaded: LoadedConfig, uploader: Uploader, code: int) -> int:
    """Upload what the run has left, when no other process waits for this one any more; return the exit code."""
    code = uploader.finish(code)
    if code == 0:
        push_final(loaded)
    return code


def _train(
    loaded: LoadedConfig,
    strategy: Strategy,
    *,
    supervision: Supervision,
    uploader: Uploader,
    startup: StartUp,
    checksums: ChecksumPrefetch | None,
    log: RunLog,
) -> int:
    config = loaded.config
    lessons = make_training_data(config, log)
    plan = make_run_plan(config, lessons)
    startup.end("data")
    accelerator = make_accelerator(config, strategy)
    require_mergeable(config)
    supervision.meet()
    if finished := find_finished(config, lessons, num_steps=plan.num_steps, strategy=strategy.name, log=log):
        return end_finished_run(finished, supervision=supervision, num_steps=plan.num_steps)
    rate = plan.schedule.peak
    machine = prepare_model(
        config, strategy, accelerator=accelerator, training_data=lessons, learning_rate=rate, log=log
    )
    require_sample_isolation(config, lessons, machine)
    verify_before_training(lessons)
    startup.end("model")
    supervision.watchdog.detect_hangs(config.run.hang_after_seconds)
    lessons = precompute(config, lessons, machine, log=log)  # from the model as it starts: before weights are loaded
    lessons = replace(lessons, task=attach_teacher(config, lessons.task, accelerator, log=log))
    checkpointer, progress = resume_run(
        config, machine, strategy=strategy.name, training_data=lessons, checksums=checksums, log=log
    )
    reporter = uploader.watch_reporter(open_run_folder(loaded, machine, training_data=lessons, log=log))
    with closing(reporter), uploader, supervision.recording_first_error(DiskError):
        checkpointer.rehearse(num_saves=plan.num_due(config.checkpoint.every_steps, after=progress.step))
        settle = partial(sync_batch_norm, machine.model)
        save = ReportingSaver(checkpointer, reporter, supervision.status.checkpoint, before=settle)
        wishes = make_stop_sources(config, note=supervision.note, save=save, started=startup.started_at, log=log)
        parts = make_parts(
            config, lessons, prepared=machine, plan=plan, reporter=reporter, save=save, stop_sources=wishes
        )
        reporter(
            RunStarted(progress.step, plan.num_steps, describe_strategy(strategy), plan.arithmetic, config.model_dump())
        )
        told = report_startup(parts, startup)
        return fit_and_finish(
            loaded, told, progress=progress, training_data=lessons, prepared=machine, supervision=supervision
        )


def launched_strategy(loaded: LoadedConfig) -> Strategy:
    """Return the strategy that was launched; raises ConfigError or StrategyError where it does not fit the job."""
    config = loaded.config
    environment = read_environment(os.environ, has_device=torch.accelerator.is_available())
    require_divisible_batch(loaded, num_processes=environment.world)
    job = JobSettings(
        strategy=config.run.strategy,
        precision=config.train.precision,
        microbatch_size=config.train.microbatch_size,
        max_gradient_norm=config.train.max_gradient_norm,
        optimizer=config.train.optimizer.name,
        averages_weights=config.train.average is not None,
        unfreezes_later=bool(config.train.unfreeze),
        pins_memory=config.data.pin_memory is True,
        offloads_activations=config.model.activation_offload,
        updates_in_backward=config.train.optimizer.in_backward,
        rounds_by_position=any(
            uses_low_bit_adamw(config.train.optimizer, dtype=dtype) for dtype in trained_dtypes(config)
        ),
        has_mixed_dtypes=adapter_of(config) is not None and config.model.dtype != "float32",
    )
    return choose_strategy(environment, job)


EXPORTED_AFTER = (FINISHED, EARLY_STOPPING)
"""Why a run may end so that its model is final; after a signal or a limit it is to be continued."""

TALKING = ("causal_lm", "image_text_to_text")
"""Heads of models that `finetune chat` can talk to."""

EXIT_CODES = {**signals.EXIT_CODES, SPOT_NOTICE: 143, FAILED_SAVE: 1}
"""Every other end is a success; a machine that is taken away is to be replaced, as after SIGTERM."""


def fit_and_finish(
    loaded: LoadedConfig,
    parts: Parts,
    *,
    progress: Progress,
    training_data: TrainingData,
    prepared: PreparedModel,
    supervision: Supervision,
) -> int:
    """Train, export the model where the run is over, report the end and return the exit code. Collective."""
    started, folder = time.monotonic(), Path(loaded.config.run.folder)
    supervision.status.run(progress, num_steps=parts.plan.num_steps)
    section = loaded.config.evaluate
    if section is not None and section.at_start and progress.step == 0:
        parts.evaluate(progress.step)
    reason = _run_loop(parts, progress, watch=supervision)
    is_final = reason in EXPORTED_AFTER
    if is_final:
        export_final(
            loaded, parts.reporter, progress=progress, training_data=training_data, prepared=prepared, reason=reason
        )
    code = EXIT_CODES.get(reason, 0)
    if reason == STOP_FILE and distributed.is_main():
        remove_stop_file(folder, log=lambda text: parts.reporter(Warned(progress.step, text)))  # it has been obeyed
    supervision.status.end(status.FINISHED if is_final else status.STOPPED, reason=reason, exit_code=code)
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


def end_finished_run(finished: FinishedRun, *, supervision: Supervision, num_steps: int) -> int:
    """Report that there is nothing left to do, and return the exit code of a success."""
    place, reason = str(finished.checkpoint), finished.reason
    return status.record_finished(supervision.status, finished.progress, place, reason, num_steps=num_steps)


def _run_loop(parts: Parts, progress: Progress, *, watch: Supervision) -> str:
    watch.watchdog.begin_training()
    try:
        return train(parts, progress)
    except NonFiniteError:  # raised on every rank alike, so they can still speak
        report_steps(parts, progress)
        with suppress(CheckpointError):  # what is being written was taken before
            parts.save.wait_for_writes()
        raise
