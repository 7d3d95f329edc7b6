"""Rank, world and the collectives of a run, over torch.distributed; everything works in a single process too.

A function that is called on rank 0 or on all ranks raises its error on all of them when it fails on one.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import Enum
from typing import TypeVar

import torch
import torch.distributed as dist

from finetune.errors import CheckpointError, FinetuneError
from finetune.runtime.processes import exit_process

T = TypeVar("T")


class Group(Enum):
    """A process group of all ranks: the collectives of one never wait for, or mix with, those of another."""

    MAIN = "main"  # torch's default group, which training uses
    BACKGROUND = "behind"  # for work in the background: gloo, with a timeout of its own


_BACKGROUND_TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another to write its part of the state on the slowest disk."""

_CPU_GROUP_TIMEOUT = timedelta(days=2)
"""How long ranks that are done wait for the slowest."""


def rank() -> int:
    """Return this process's rank, from the environment before torch.distributed is initialized."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return whether this is rank 0, which writes files and prints."""
    return rank() == 0


def is_distributed() -> bool:
    """Return whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def init_cpu_process_group() -> None:
    """Make a gloo process group of the launched processes, for work without a strategy or a device. Collective."""
    if world() > 1 and not is_distributed():
        dist.init_process_group("gloo", timeout=_CPU_GROUP_TIMEOUT)


def barrier(group: Group = Group.MAIN) -> None:
    """Wait until every rank is here. Collective."""
    if is_distributed():
        dist.barrier(group=_groups.get(group))


def sum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, leaving the argument as it is. Collective."""
    total = tensor.clone()
    if is_distributed():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def gather_objects(value: T, *, group: Group = Group.MAIN) -> list[T]:
    """Return every rank's value, in rank order, on every rank. Collective."""
    if not is_distributed():
        return [value]
    values: list[T | None] = [None] * world()
    dist.all_gather_object(values, value, group=_groups.get(group))
    return values  # type: ignore[return-value]  # every place has been filled


def broadcast_object(value: T, *, group: Group = Group.MAIN) -> T:
    """Return rank 0's value on every rank. Collective."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_groups.get(group))
    return box[0]


def open_background_group() -> None:
    """Open the background group, unless it is open. Collective."""
    if is_distributed() and Group.BACKGROUND not in _groups:
        _groups[Group.BACKGROUND] = dist.new_group(backend="gloo", timeout=_BACKGROUND_TIMEOUT)


def close_background_group() -> None:
    """Close the background group, so that ranks that wait in it fail at once; it can be opened again once all have.

    Connections close with the last reference to the group, hence only this module has one.
    """
    handle = _groups.pop(Group.BACKGROUND, None)
    if handle is not None:
        dist.destroy_process_group(handle)


def open_control_group() -> None:
    """Prepare the group of `sum_counts`: gloo, so that counting needs no host-device synchronisation. Collective."""
    global _control_group
    if is_distributed() and dist.get_backend() != "gloo":
        _control_group = dist.new_group(backend="gloo")


def shut_down(code: int, *, afterwards: Callable[[int], int] = int) -> int:
    """Shut the process group down in order and return `code`; one process of several exits right here. Collective.

    `afterwards` is what this rank still does when no other rank waits for it, however long it takes; it is given the
    code and returns it or another.

    A rank that exits while another still communicates with it takes it down, hence the barrier. Then the
    interpreter's teardown is left out: now and then it aborts in a library's thread ("terminate called without an
    active exception", seen with DeepSpeed 0.19 under gloo), which would fail a run that has succeeded. Handlers
    registered with `atexit` are run.
    """
    if not is_distributed() or world() == 1:
        return afterwards(code)
    dist.barrier()
    dist.destroy_process_group()
    return exit_process(afterwards(code))


def sum_counts(counts: Sequence[int]) -> list[int]:
    """Return the element-wise sum of every rank's counts, exactly, without touching a device. Collective."""
    if not is_distributed():
        return list(counts)
    totals = torch.tensor(list(counts), dtype=torch.int64)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM, group=_control_group)
    return totals.tolist()


_control_group: dist.ProcessGroup | None = None  # None: the default group
_groups: dict[Group, dist.ProcessGroup] = {}  # the main group is torch's default


def run_on_all_ranks(function: Callable[[], T], *, group: Group = Group.MAIN) -> list[T]:
    """Call `function` on every rank and return all values; if it fails on one, raise its error on all. Collective.

    `function` must not be collective: ranks would wait for one that has failed. No rank returns before all are done.
    """
    value, failure = _attempt(function)
    outcomes = gather_objects((value, error_text(failure) if failure is not None else None), group=group)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            where = f" (on rank {rank})" if world() > 1 else ""
            raise CheckpointError(error + where) from failure
    return [value for value, _ in outcomes]  # type: ignore[misc]  # no failure, so there is a value


def run_on_rank_0(function: Callable[[], T], *, group: Group = Group.MAIN) -> T:
    """Call `function` on rank 0 and return its value on all ranks; if it fails, raise its error on all. Collective.

    No rank returns before rank 0 is done.
    """
    value, failure = _attempt(function) if is_main() else (None, None)
    value, error = broadcast_object((value, error_text(failure) if failure is not None else None), group=group)
    if error is not None:
        raise CheckpointError(error) from failure
    return value  # type: ignore[return-value]  # no failure, so there is a value


def error_text(error: BaseException) -> str:
    """Return the message of an error, with its type unless it is one of this package's."""
    return str(error) if isinstance(error, FinetuneError | OSError) else f"{type(error).__name__}: {error}"


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # of any type: the other ranks must know of it
        return None, error
