"""A run from its config to its exit code: validate, prepare the data, build, restore, fit, finish.

Each phase takes what the one before it returned, so their order cannot change: `build` precomputes with the weights
that the run starts from, `restore` loads a checkpoint into what `build` returned, `fit` trains what was restored.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

from finetune.checkpoint.read.checksum_prefetch import ChecksumPrefetch
from finetune.config.load import LoadedConfig, with_local_folder
from finetune.config.plugins import activate_options
from finetune.errors import DiskError, HubError
from finetune.report.page.facts import InterruptionCosts
from finetune.report.reporter import CallbackReporter, Reporter, RunLog
from finetune.report.timing import StartupTimer
from finetune.run.context import RunContext, make_context
from finetune.run.final_export import push_final
from finetune.run.fit import finish_run, fit
from finetune.run.microbatch_size import resolve_microbatch_size
from finetune.run.setup.accelerator import make_accelerator
from finetune.run.setup.build import build
from finetune.run.setup.model_checks import CheckedJob, Stage, changes_config, check_model
from finetune.run.setup.strategy import launched_strategy
from finetune.run.setup.training_data import prepare_data
from finetune.run.state.finished import RunResult, result_of_run
from finetune.run.state.resume import RestoredRun, find_finished, restore
from finetune.run.state.run_folder import fetch_run_folder, open_run_folder
from finetune.run.state.upload import Uploader, make_uploader
from finetune.run.supervision import Supervision, model_code_errors, supervised_run
from finetune.runtime import distributed
from finetune.runtime.progress import Progress
from finetune.runtime.text.terminal import quiet_libraries
from finetune.strategy.launch_file import is_set_by_accelerate
from finetune.strategy.protocol import Strategy


def train_from_config(loaded: LoadedConfig, checksums: ChecksumPrefetch | None = None) -> int:
    """Train as the config says and return the exit code. Collective over all launched processes.

    `checksums` is what `prefetch_checksums` has started.
    """
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
        result = distributed.run_on_rank_0(
            lambda: result_of_run(context.paths.folder, reason=reason, progress=progress)
        )
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


def validate(loaded: LoadedConfig) -> RunContext:
    """Return the context of the run; raises ConfigError, StrategyError or ModelError, on every rank alike."""
    quiet_libraries(is_main=distributed.is_main())
    loaded = with_local_folder(loaded)
    context = make_context(loaded, launched_strategy(loaded))
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
