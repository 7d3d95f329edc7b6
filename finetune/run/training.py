"""A run from its config to its exit code: the parts are made, trained, and what they have become is exported."""

import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from finetune.checkpoint.ahead import Ahead
from finetune.config.load import LoadedConfig, require_shareable
from finetune.config.rules.model import adapter_of, learning_dtypes
from finetune.data.prepared.cache import cache_folder
from finetune.errors import DiskError
from finetune.model.batch_norm import settle_batch_norm
from finetune.report.announcer import Announcer
from finetune.report.events import RunStarted
from finetune.run.adapters import require_adapters_fit
from finetune.run.ahead import verify_ahead
from finetune.run.clearing import clear_leftovers
from finetune.run.continuing import continue_run
from finetune.run.fetch import fetch_run, staged
from finetune.run.finish import end_at_once, train_to_the_end
from finetune.run.finished import find_finished
from finetune.run.folder import open_run
from finetune.run.isolation import require_isolation
from finetune.run.lessons import make_lessons, make_run_plan
from finetune.run.machine import make_accelerator, make_machine
from finetune.run.merging import require_mergeable
from finetune.run.mirror import Mirror, make_mirror
from finetune.run.parts import make_parts
from finetune.run.priors import with_priors
from finetune.run.publish import publish_final
from finetune.run.saving import ReportedSaving
from finetune.run.startup import telling_start
from finetune.run.teacher import taught
from finetune.run.trial import require_own_values_fit
from finetune.run.verifying import mend_before_training
from finetune.run.watch import Watch, watched_run
from finetune.run.wishes import make_wishes
from finetune.runtime import ranks
from finetune.runtime.log import quieten
from finetune.runtime.startup import StartUp
from finetune.strategy.choose import choose_strategy
from finetune.strategy.environment import read_environment
from finetune.strategy.explain import explain
from finetune.strategy.protocol import Strategy
from finetune.strategy.reconcile import JobFacts
from finetune.train.optimizer import rounds_by_place


def train_from_config(loaded: LoadedConfig, ahead: Ahead | None = None) -> int:
    """Train as the config says and return the exit code. Collective over all launched processes.

    `ahead` is what `verify_ahead` has begun.
    """
    startup, say = StartUp.of_process(), Announcer(is_main=ranks.is_main())
    loaded = staged(loaded)
    quieten(is_main=ranks.is_main())
    strategy = launched_strategy(loaded)
    require_adapters_fit(loaded.config, strategy.name)
    mirror = make_mirror(loaded)
    with watched_run(Path(loaded.config.run.folder), say=say, also=(cache_folder(loaded.config.data),)) as watch:
        if ranks.is_main():
            clear_leftovers(loaded.config, say=say)
        fetch_run(loaded, say=print)
        ahead = ahead or verify_ahead(loaded)
        require_own_values_fit(loaded.config)
        code = _train(loaded, strategy, watch=watch, mirror=mirror, startup=startup, ahead=ahead, say=say)
    return ranks.leave(code, afterwards=partial(_hand_over, loaded, mirror))


def _hand_over(loaded: LoadedConfig, mirror: Mirror, code: int) -> int:
    """Upload what the run has left, when no other process waits for this one any more; return the exit code."""
    code = mirror.finish(code)
    if code == 0:
        publish_final(loaded)
    return code


def _train(
    loaded: LoadedConfig,
    strategy: Strategy,
    *,
    watch: Watch,
    mirror: Mirror,
    startup: StartUp,
    ahead: Ahead | None,
    say: Announcer,
) -> int:
    config = loaded.config
    lessons = make_lessons(config, say)
    plan = make_run_plan(config, lessons)
    startup.end("data")
    accelerator = make_accelerator(config, strategy)
    require_mergeable(config)
    watch.meet()
    if finished := find_finished(config, lessons, num_steps=plan.num_steps, strategy=strategy.name, say=say):
        return end_at_once(finished, watch=watch, num_steps=plan.num_steps)
    rate = plan.schedule.peak
    machine = make_machine(config, strategy, accelerator=accelerator, lessons=lessons, learning_rate=rate, say=say)
    require_isolation(config, lessons, machine)
    mend_before_training(lessons)
    startup.end("model")
    watch.watchdog.watch_hangs(config.run.hang_after_seconds)
    lessons = with_priors(config, lessons, machine, say=say)  # from the model as it starts: before weights are loaded
    lessons = replace(lessons, task=taught(config, lessons.task, accelerator, say=say))
    checkpointer, progress = continue_run(
        config, machine, strategy=strategy.name, lessons=lessons, ahead=ahead, say=say
    )
    reporter = mirror.told_by(open_run(loaded, machine, lessons=lessons, say=say))
    with closing(reporter), mirror, watch.first_error(DiskError):
        checkpointer.rehearse(num_saves=plan.num_due(config.checkpoint.every_steps, after=progress.step))
        settle = partial(settle_batch_norm, machine.model)
        save = ReportedSaving(checkpointer, reporter, watch.status.checkpoint, before=settle)
        wishes = make_wishes(config, note=watch.note, save=save, started=startup.began_at, say=say)
        parts = make_parts(config, lessons, machine=machine, plan=plan, reporter=reporter, save=save, wishes=wishes)
        reporter(RunStarted(progress.step, plan.num_steps, explain(strategy), plan.arithmetic, config.model_dump()))
        told = telling_start(parts, startup)
        return train_to_the_end(loaded, told, progress=progress, lessons=lessons, machine=machine, watch=watch)


def launched_strategy(loaded: LoadedConfig) -> Strategy:
    """Return the strategy that was launched; raises ConfigError or StrategyError where it does not fit the job."""
    config = loaded.config
    environment = read_environment(os.environ, has_device=torch.accelerator.is_available())
    require_shareable(loaded, num_processes=environment.world)
    job = JobFacts(
        strategy=config.run.strategy,
        precision=config.train.precision,
        microbatch_size=config.train.microbatch_size,
        max_gradient_norm=config.train.max_gradient_norm,
        optimizer=config.train.optimizer.name,
        keeps_average=config.train.average is not None,
        unfreezes=bool(config.train.unfreeze),
        pins_memory=config.data.pin_memory is True,
        offloads_activations=config.model.activation_offload,
        updates_in_backward=config.train.optimizer.in_backward,
        rounds_by_place=any(rounds_by_place(config.train.optimizer, dtype=dtype) for dtype in learning_dtypes(config)),
        has_two_dtypes=adapter_of(config) is not None and config.model.dtype != "float32",
    )
    return choose_strategy(environment, job)
