"""From what the launcher set to a strategy."""

from finetune.strategy.ddp import DataParallel
from finetune.strategy.deepspeed import ZeroRedundancy
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.fsdp import FullySharded
from finetune.strategy.protocol import Strategy
from finetune.strategy.reconcile import JobFacts, refuse


def choose_strategy(environment: LaunchEnvironment, job: JobFacts) -> Strategy:
    """Return the strategy that was launched; raises StrategyError where it and the job cannot both be right."""
    strategy: Strategy
    if environment.zero_stage is not None:
        strategy = ZeroRedundancy(environment, job)
    elif environment.fsdp_version is not None:
        strategy = FullySharded(environment, job)
    else:
        strategy = DataParallel(environment)
    refuse(strategy.name, environment, job)
    return strategy
