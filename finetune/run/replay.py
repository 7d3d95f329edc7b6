"""The first steps of a run, or those after one of its checkpoints, taken again without a run folder."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.config.load import LoadedConfig
from finetune.config.plugins import activate_options
from finetune.report.events import Event, RunStarted, StepTaken
from finetune.report.gpu import DeviceColumns
from finetune.report.reporter import CallbackReporter, RunLog
from finetune.report.timing import StartupTimer
from finetune.run.setup.build import RestoredRun
from finetune.run.setup.components import make_components
from finetune.run.train import restore_for_steps, run_started, validate
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.strategy.environment import read_environment
from finetune.train.loop import count_step, report_steps
from finetune.train.step import PrefetchedSteps, take_step


@dataclass(frozen=True)
class ReplayedSteps:
    """The steps that were taken again, the same on every rank."""

    started: RunStarted
    steps: Mapping[int, StepTaken]
    fingerprint: RunFingerprint


def replayed_job(loaded: LoadedConfig, *, folder: Path, checkpoint: Path | None, records_layers: bool) -> LoadedConfig:
    """Return the run's job without what writes, evaluates or runs commands, and with a microbatch that ranks can share.

    `folder` takes the place of the run folder. Without a checkpoint, the steps are the first ones.
    """
    config = loaded.config
    environment = read_environment(os.environ, has_device=False)
    num_shares = max(1, environment.world // (environment.tensor_size * environment.sequence_size))
    share, size = max(1, config.train.global_batch_size // num_shares), config.train.microbatch_size
    if isinstance(size, int) and share % size:
        size = next(smaller for smaller in range(min(size, share), 0, -1) if share % smaller == 0)
    quiet: dict[str, dict[str, object]] = {
        "run": {"folder": str(folder), "local_folder": None, "on_end": None, "strategy": None, "spot_notice": None}
        | {"record_layers": records_layers},
        "train": {"microbatch_size": size, "callbacks": (), "time_limit_minutes": None},
        "checkpoint": {"resume": "never" if checkpoint is None else str(checkpoint)},
        "report": {"sample_ids": False},
    }
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in quiet.items()}
    return replace(loaded, config=config.model_copy(update={**sections, "evaluate": None}), remote=None)


def replay_steps(loaded: LoadedConfig, *, last_step: int, check: Callable[[RestoredRun], None]) -> ReplayedSteps:
    """Take the steps up to this one, at most to the job's end; `check` may refuse the built run before. Collective."""
    startup = StartupTimer()
    activate_options(loaded.config.plugin_options)
    context = replace(validate(loaded), log=RunLog(is_main=False))
    restored = restore_for_steps(context, startup=startup)
    check(restored)
    events: list[Event] = []
    reporter = CallbackReporter(events.append, (), can_evaluate=False)
    components = make_components(
        restored, reporter=reporter, startup=startup, signals=ReceivedSignals(), gpu=DeviceColumns()
    )
    started, progress = run_started(restored, previous={}), restored.progress
    groups = PrefetchedSteps(components, first_step=progress.step)
    while progress.step < min(last_step, components.plan.num_steps):
        began = time.perf_counter()
        batches, counts, waited = groups.take(progress.step)
        record = take_step(components, batches, counts, progress=progress, started=began, data_seconds=waited)
        count_step(components, progress, record)
        report_steps(components, progress)
    steps = {event.step: event for event in events if isinstance(event, StepTaken)}
    return ReplayedSteps(started, steps, restored.fingerprint)


def active_dropout(restored: RestoredRun) -> tuple[str, ...]:
    """Return the names of what draws random numbers in a forward pass: modules with dropout, and a key of the job."""
    model: nn.Module = restored.built.prepared.unwrapped_model
    names = [
        name
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and (attribute == "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout" in attribute)
    ]
    noise = restored.context.config.train.embedding_noise
    return (*(["train.embedding_noise"] if noise else []), *names)
