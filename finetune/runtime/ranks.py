"""Which process this is, and how processes speak to one another. Works in a single process too."""

import logging
import os
import sys
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def rank() -> int:
    """Return this process's number among all, from 0; read from the launcher's environment before torch is set up."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Tell whether this is the process that writes files and speaks to the user."""
    return rank() == 0


def is_distributed() -> bool:
    """Tell whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def barrier() -> None:
    """Wait until every rank is here. Collective."""
    if is_distributed():
        dist.barrier()


def sum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, leaving the argument as it is. Collective."""
    total = tensor.clone()
    if is_distributed():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def gather_objects(value: T) -> list[T]:
    """Return every rank's value, in rank order, on every rank. Collective."""
    if not is_distributed():
        return [value]
    values: list[T | None] = [None] * world()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # every place has been filled


def broadcast_object(value: T) -> T:
    """Return rank 0's value on every rank. Collective."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def open_control_group() -> None:
    """Prepare the group on which `sum_counts` speaks: gloo, so that nobody waits for a GPU to count. Collective."""
    global _control_group
    if is_distributed() and dist.get_backend() != "gloo":
        _control_group = dist.new_group(backend="gloo")


def leave(code: int) -> int:
    """Take leave of the others in order and return `code`; one process of several ends right here. Collective.

    A rank that ends while another still speaks to it takes it down, hence the barrier. Then the interpreter's teardown
    is left out: now and then it aborts in a library's thread ("terminate called without an active exception", seen with
    DeepSpeed 0.19 under gloo), which would make a failure of a run that has succeeded.
    """
    if not is_distributed() or world() == 1:
        return code
    dist.barrier()
    dist.destroy_process_group()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def sum_counts(counts: Sequence[int]) -> list[int]:
    """Return the element-wise sum of every rank's counts, exactly, without touching a device. Collective."""
    totals = torch.tensor(list(counts), dtype=torch.int64)
    if is_distributed():
        dist.all_reduce(totals, op=dist.ReduceOp.SUM, group=_control_group)
    return [int(total) for total in totals]


_control_group: dist.ProcessGroup | None = None  # None: the default group
