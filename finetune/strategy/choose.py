"""Chooses the strategy from the launcher's settings, and describes it in one sentence."""

from finetune.strategy.ddp import DataParallel, TensorParallel
from finetune.strategy.deepspeed import ZeroRedundancy
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.fsdp import FullySharded
from finetune.strategy.protocol import Sharded, Strategy
from finetune.strategy.reconcile import JobSettings, refuse_conflicts


def choose_strategy(environment: LaunchEnvironment, job: JobSettings) -> Strategy:
    """Return the strategy that was launched; raises StrategyError if it contradicts the job."""
    strategy: Strategy
    if environment.zero_stage is not None:
        strategy = ZeroRedundancy(environment, job)
    elif environment.fsdp_version is not None:
        strategy = FullySharded(environment, job)
    elif environment.tensor_size > 1:
        strategy = TensorParallel(environment)
    else:
        strategy = DataParallel(environment)
    refuse_conflicts(strategy.name, environment, job)
    return strategy


def describe_strategy(strategy: Strategy) -> str:
    """Return a sentence with the number of processes and what is sharded and replicated.

    >>> describe_strategy(DataParallel(LaunchEnvironment(world=4)))
    'ddp on 4 processes copies parameters, gradients and optimizer state'
    """
    world = strategy.expected.num_processes
    processes = "1 process" if world == 1 else f"{world} processes"
    split = [part.value for part in Sharded if part in strategy.sharded]
    copied = [part.value for part in Sharded if part not in strategy.sharded]
    if world == 1:
        return f"{strategy.name} on 1 process"
    parts = []
    for names, verb in ((split, "splits"), (copied, "copies")):
        if names:
            parts.append(f"{verb} {' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))}")
    expected = strategy.expected
    for name, size in (("sequences", expected.sequence_size), ("layers", expected.tensor_size)):
        if size > 1 and (strategy.name != "tp" or size < world):
            parts.append(f"shares {name} over groups of {size}")
    return f"{strategy.name} on {processes} {', '.join(parts)}"
