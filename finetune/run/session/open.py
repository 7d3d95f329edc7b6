"""Open a run to be taken step by step, by the phases of `finetune train`, without its supervision."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass

from finetune.config.load import LoadedConfig
from finetune.config.plugins import activate_options
from finetune.errors import StrategyError, UserError
from finetune.registry.tasks import TASKS
from finetune.report.events import RunEnded
from finetune.report.gpu import DeviceColumns
from finetune.report.page.facts import InterruptionCosts
from finetune.report.reporter import CallbackReporter, Reporter
from finetune.report.timing import StartupTimer
from finetune.run.context import RunContext
from finetune.run.setup.build import RestoredRun
from finetune.run.setup.components import make_components
from finetune.run.state.run_folder import fetch_run_folder, open_run_folder
from finetune.run.train import restore_for_steps, run_started, validate
from finetune.runtime import distributed
from finetune.runtime.optional import no_op
from finetune.runtime.run_folder import lock_run_folder
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.train.step import TrainingComponents

SESSION_CLOSED = "session closed"

_LEFT_TO_CALLER = (
    *("evaluate.at_start", "evaluate.every_steps", "checkpoint.every_steps", "checkpoint.rehearse", "report.profile"),
    *("train.stop_after_steps", "train.time_limit_minutes", "train.early_stopping", "train.callbacks"),
    *("run.on_end", "run.record_layers", "run.spot_notice", "run.hang_after_seconds", "export.checkpoint"),
)
"""Keys that only the loop of `finetune train` and its supervision read."""


@dataclass(frozen=True)
class OpenedRun:
    """A run that was built and restored, and the components of its steps."""

    restored: RestoredRun
    components: TrainingComponents
    reporter: Reporter


@contextmanager
def open_run(loaded: LoadedConfig) -> Iterator[OpenedRun]:
    """Build the run, or resume it from its checkpoint as the job says, and report its end. Collective.

    Rank 0 locks the run folder. After an error nothing is reported, and no rank waits for another.
    """
    startup = StartupTimer()
    activate_options(loaded.config.plugin_options)
    context = validate(loaded)
    _require_steppable(context)
    if written := [key for key in _LEFT_TO_CALLER if key in context.loaded.sources]:
        context.log(f"in a session the caller evaluates, saves and stops; without effect are {', '.join(written)}")
    log, is_main = context.log, distributed.is_main()
    with lock_run_folder(context.folder, log=log) if is_main else nullcontext():
        checksums = fetch_run_folder(context.loaded, None, log=log)
        restored = restore_for_steps(context, startup=startup, checksums=checksums)
        config = restored.context.config
        costs = InterruptionCosts(no_op, hours_stated=config.run.hours_between_interruptions)
        with closing(open_run_folder(restored.context.loaded, restored.built, costs=costs, log=log)) as reporter:
            components = make_components(
                restored,
                reporter=CallbackReporter(reporter, (), can_evaluate=False),
                startup=startup,
                signals=ReceivedSignals(),
                gpu=DeviceColumns(),
            )
            reporter(run_started(restored, previous={}))
            started = time.monotonic()
            yield OpenedRun(restored, components, reporter)
            components.save.wait_for_writes()
            reporter(
                RunEnded(
                    step=restored.progress.step,
                    reason=SESSION_CLOSED,
                    seconds=time.monotonic() - started,
                    metrics=restored.progress.last_metrics,
                    final_folder=None,
                    talks=TASKS[config.task.name].can_chat,
                )
            )
            distributed.barrier()


def _require_steppable(context: RunContext) -> None:
    """Raise an error where a step cannot be taken in two calls, or the run is at a URL."""
    if context.config.train.optimizer.in_backward:
        raise UserError(
            "train.optimizer.in_backward: a session updates the weights in `optim_step`, not in the backward pass. "
            "Remove the key."
        )
    if context.strategy.expected.sequence_size > 1:
        raise StrategyError("a session does not share rows among processes. Launch without parallelism_config_sp_size.")
    if context.strategy.expected.tensor_size > 1:
        raise StrategyError("a session does not split layers. Launch without parallelism_config_tp_size.")
    if context.loaded.remote is not None:
        raise UserError(
            f"run.folder: a session writes to a folder on this machine, not to {context.loaded.remote}. Write a path."
        )
