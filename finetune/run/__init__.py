"""One RunConfig becomes parts, the parts are trained, the model is exported: the one place where all wings meet."""

import os
from contextlib import closing

import torch

from finetune.config.load import LoadedConfig, require_shareable
from finetune.report.announcer import Announcer
from finetune.report.events import RunStarted
from finetune.run.finish import train_to_the_end
from finetune.run.folder import open_run
from finetune.run.lessons import make_lessons, make_run_plan
from finetune.run.machine import make_machine
from finetune.run.parts import make_parts
from finetune.run.saving import ReportedSaving, continue_run
from finetune.runtime import ranks
from finetune.runtime.log import quieten
from finetune.runtime.signals import noted_signals
from finetune.strategy.choose import choose_strategy
from finetune.strategy.environment import read_environment
from finetune.strategy.explain import explain
from finetune.strategy.protocol import Strategy
from finetune.strategy.reconcile import JobFacts


def train_from_config(loaded: LoadedConfig) -> int:
    """Train as the config says and return the exit code. Collective over all launched processes."""
    config, say = loaded.config, Announcer(is_main=ranks.is_main())
    quieten(is_main=ranks.is_main())
    strategy = launched_strategy(loaded)
    lessons = make_lessons(config, say)
    plan = make_run_plan(config, lessons)
    machine = make_machine(config, strategy, lessons=lessons, learning_rate=plan.schedule.peak, say=say)
    checkpointer, progress = continue_run(config, machine, lessons=lessons, say=say)
    reporter = open_run(loaded, machine, say=say)
    with closing(reporter), noted_signals() as note:  # from here on there is something to save
        save = ReportedSaving(checkpointer, reporter)
        parts = make_parts(config, lessons, machine=machine, plan=plan, reporter=reporter, save=save, note=note)
        reporter(RunStarted(progress.step, plan.num_steps, explain(strategy), plan.arithmetic, config.model_dump()))
        code = train_to_the_end(loaded, parts, progress=progress, lessons=lessons, machine=machine)
    return ranks.leave(code)


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
        pins_memory=config.data.pin_memory,
        has_two_dtypes=config.model.lora is not None and config.model.dtype != "float32",
    )
    return choose_strategy(environment, job)
