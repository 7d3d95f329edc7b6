"""Rank, world and the collectives of a run, over torch.distributed; everything also works in a single process.

If a function that runs on rank 0 or on all ranks fails on one of them, its error is raised on all.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from finetune.errors import CheckpointError, FinetuneError, StrategyError
from finetune.runtime.processes import exit_process

T = TypeVar("T")


@dataclass(frozen=True)
class RankGroup:
    """A group of consecutive ranks, and the index of this rank in it; by default of one rank."""

    size: int = 1
    index: int = 0
    number: int = 0  # of the group among all
    num_groups: int = 1


class Group(Enum):
    """A process group of all ranks, in addition to torch's default one, which sends the tensors of training."""

    HOST = "host"  # gloo, for objects, counts and barriers: no host-device synchronization, its own timeout
    BACKGROUND = "background"  # for work in the background: gloo, with its own timeout


_BACKGROUND_TIMEOUT = timedelta(hours=1)
"""Time that a rank waits for another to write its part of the state to a slow disk."""

_MARGIN = _BACKGROUND_TIMEOUT + timedelta(minutes=5)
"""From the hang limit to the timeout: a checkpoint being written is a sign of life, which delays the report."""

_LONGEST_TIMEOUT = timedelta(days=24)
"""torch's store passes milliseconds to `poll` as a 32-bit integer."""

_HOST_TIMEOUT = _LONGEST_TIMEOUT
"""Time that ranks wait for the slowest, or for rank 0 to work alone; a watchdog ends hanging runs."""

_GROUP_TIMEOUTS = {Group.HOST: _HOST_TIMEOUT, Group.BACKGROUND: _BACKGROUND_TIMEOUT}

_LAZY_CONNECTIONS = "TORCH_GLOO_LAZY_INIT"


def group_timeout(hang_after_seconds: float | None) -> timedelta:
    """Return the timeout of torch's default group: after the report by `run.hang_after_seconds`, days for None.

    >>> group_timeout(1800.0) > timedelta(seconds=1800), group_timeout(None).days
    (True, 24)
    """
    if hang_after_seconds is None:
        return _LONGEST_TIMEOUT
    return min(timedelta(seconds=hang_after_seconds) + _MARGIN, _LONGEST_TIMEOUT)


def rank() -> int:
    """Return this process's rank, from the environment before torch.distributed is initialized."""
    return dist.get_rank() if is_distributed() else int(os.environ.get("RANK", "0"))


def world() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else int(os.environ.get("WORLD_SIZE", "1"))


def place_in_group(size: int) -> tuple[int, int, int, int]:
    """Return the fields of this rank's RankGroup, where every `size` consecutive ranks are a group."""
    return size, rank() % size, rank() // size, world() // size


def is_main() -> bool:
    """Return whether this is rank 0, which writes files and prints."""
    return rank() == 0


def is_distributed() -> bool:
    """Return whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def init_cpu_process_group() -> None:
    """Make a gloo process group of the launched processes, for work without a strategy or a device. Collective."""
    if world() > 1 and not is_distributed():
        with reported_wait():
            dist.init_process_group("gloo", timeout=_HOST_TIMEOUT)


@contextmanager
def reported_wait(*, seconds: float = 10.0) -> Iterator[None]:
    """Print which processes are waited for where the process group is not made within this time.

    Raises StrategyError where the port is in use. RANK and WORLD_SIZE may be left over from another launch.
    """
    if world() == 1 or is_distributed():
        yield
        return
    own, address = rank(), f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    variables = f"RANK={own} and WORLD_SIZE={world()}"
    advice = "are set in the environment: unset them where no launcher has started this process"
    text = f"rank {own} has waited {seconds:g} s at {address} for the others of {world()} processes"
    timer = threading.Timer(seconds, lambda: print(f"{text}. {variables} {advice}.", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise StrategyError(
            f"{address}: the port at which {variables} make this process wait for the others is in use. They {advice}, "
            "or set another MASTER_PORT."
        ) from None  # not a lost contact
    finally:
        timer.cancel()


def barrier(group: Group = Group.HOST) -> None:
    """Wait for all ranks. Collective."""
    if is_distributed():
        dist.barrier(group=_groups.get(group))


def sum_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, without changing the argument. Collective."""
    total = tensor.clone()
    if is_distributed() and not are_collectives_local:
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def sum_in_rank_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, added rank by rank. Collective.

    Bitwise independent of other tensors in the buffer: an all-reduce starts each chunk at a different rank.
    """
    if are_collectives_local:
        return tensor.clone()
    total, *others = gather_rows(tensor, [len(tensor)] * world())
    return sum(others, total)


def gather_rows(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return every rank's tensor, in rank order, without gradients; `sizes` are their first dimensions. Collective."""
    own = tensor.detach()
    if not is_distributed():
        return [own]
    if are_collectives_local:
        return [own.clone() for _ in sizes]
    padded = own.new_zeros((max(sizes), *own.shape[1:]))
    padded[: len(own)] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [rows[:size] for rows, size in zip(gathered, sizes, strict=True)]


def gather_objects(value: T, *, group: Group = Group.HOST) -> list[T]:
    """Return every rank's value, in rank order, on every rank. Collective."""
    if not is_distributed():
        return [value]
    if are_collectives_local:
        return [value] * world()
    values: list[T | None] = [None] * world()
    dist.all_gather_object(values, value, group=_groups.get(group))
    return values  # type: ignore[return-value]  # every element has been filled


def broadcast_object(value: T, *, group: Group = Group.HOST) -> T:
    """Return rank 0's value on every rank. Collective."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_groups.get(group))
    return box[0]


@contextmanager
def local_collectives() -> Iterator[None]:
    """Make sums and gathers of this process use only its own values, without communication.

    A sum is that of this rank, and a gather repeats its value. For trials, whose results are discarded.
    """
    global are_collectives_local
    are_collectives_local = True
    try:
        yield
    finally:
        are_collectives_local = False


are_collectives_local = False
"""Whether this process is within `local_collectives`."""


def open_group(group: Group) -> None:
    """Open the group, unless it is open; without the host group, torch's default group is used. Collective."""
    if not is_distributed() or group in _groups:
        return
    # Gloo connects only ranks that communicate, unless the environment sets the variable: a full mesh needs a socket
    # for every rank, the rings and trees of our collectives a few dozen in any world.
    is_set = _LAZY_CONNECTIONS in os.environ
    os.environ.setdefault(_LAZY_CONNECTIONS, "1")
    try:
        opened = dist.new_group(backend="gloo", timeout=_GROUP_TIMEOUTS[group])
    finally:
        if not is_set:
            del os.environ[_LAZY_CONNECTIONS]
    _groups[group] = opened
    # Each collective once: ranks that connect later need the store, which ends with the launcher, and could wait
    # forever for a rank that has died in the meantime.
    dist.all_reduce(torch.zeros(1), group=opened)
    gather_objects(0, group=group)
    broadcast_object(0, group=group)
    barrier(group)


def close_background_group() -> None:
    """Close the background group, so that ranks that wait in it fail at once; it can be opened again once all have.

    Connections close with the last reference to the group, hence only this module has one.
    """
    handle = _groups.pop(Group.BACKGROUND, None)
    if handle is not None:
        dist.destroy_process_group(handle)


def shut_down(code: int, *, afterwards: Callable[[int], int] = int) -> int:
    """Shut the process group down in order and return `code`; with several processes, this one exits here. Collective.

    `afterwards` is called with the code when no other rank waits for this one, so it may take long; its result is the
    final code.

    A rank that exits while another still communicates with it makes that one fail, hence the barrier. The interpreter's
    teardown is skipped: it occasionally aborts in a library's thread ("terminate called without an active exception",
    seen with DeepSpeed 0.19 under gloo), which would fail a successful run. Handlers registered with `atexit` run.
    """
    if not is_distributed() or world() == 1:
        return afterwards(code)
    wait_for_devices()  # no rank destroys its communicators while a kernel of another uses them
    _groups.clear()
    dist.destroy_process_group()
    return exit_process(afterwards(code))


def local_device() -> torch.device:
    """Return this process's accelerator, by its local rank; the CPU on a machine without one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, "there is one"
    return torch.device(accelerator.type, index)


def wait_for_devices() -> None:
    """Wait until no rank needs a process group any more, not even for a kernel of its device. Collective."""
    if is_distributed():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        barrier()


@contextmanager
def restored_groups() -> Iterator[None]:
    """Close the process groups that were made within the context, torch's default one if it is among them.

    Groups of a caller are kept. Not collective: after an error, the ranks that wait in such a group fail at once.

    A launcher's store outlives the groups and keeps the addresses of their ranks under names that the groups of the
    next run also have. So each run of a process uses its own prefix for addresses.
    """
    global _num_runs
    _num_runs += 1
    c10d: Any = distributed_c10d
    rendezvous, prefix = c10d.rendezvous, f"finetune-{_num_runs}"

    def prefixed(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for store, *others in rendezvous(*args, **kwargs):
            yield c10d.PrefixStore(prefix, store), *others

    c10d.rendezvous = prefixed
    had_default = is_distributed()
    before = set(c10d._world.pg_map)
    timeouts = {name: getattr(c10d, name) for name in _TIMEOUTS if hasattr(c10d, name)}
    _groups.clear()
    try:
        yield
    finally:
        c10d.rendezvous = rendezvous
        _groups.clear()
        for name, timeout in timeouts.items():
            setattr(c10d, name, timeout)
        if is_distributed() and not had_default:
            dist.destroy_process_group()
        for group in [group for group in c10d._world.pg_map if group not in before]:
            dist.destroy_process_group(group)


_num_runs = 0

_TIMEOUTS = ("default_pg_timeout", "default_pg_nccl_timeout")
"""Of groups that are made without one: strategies change them."""


def sum_counts(counts: Sequence[int]) -> list[int]:
    """Return the element-wise sum of every rank's counts, exactly, without touching a device. Collective."""
    return start_sum_counts(counts)()


def start_sum_counts(counts: Sequence[int]) -> Callable[[], list[int]]:
    """Start `sum_counts` and return a function that waits for the sums. Collective."""
    if not is_distributed():
        return lambda: list(counts)
    totals = torch.tensor(list(counts), dtype=torch.int64)
    work = dist.all_reduce(totals, op=dist.ReduceOp.SUM, group=_groups.get(Group.HOST), async_op=True)

    def wait() -> list[int]:
        work.wait()
        return totals.tolist()

    return wait


_groups: dict[Group, dist.ProcessGroup] = {}


@contextmanager
def rank_0_works_alone() -> Iterator[None]:
    """Keep all ranks in the context until rank 0 leaves it, except after an error. Collective."""
    with _watched_by_rank_0():
        yield
        barrier()


@contextmanager
def _watched_by_rank_0() -> Iterator[None]:
    global is_rank_0_alone
    is_rank_0_alone = True
    try:
        yield
    finally:
        is_rank_0_alone = False


is_rank_0_alone = False
"""Whether the other ranks wait for rank 0: in its main thread, or in that of this process."""


def run_on_all_ranks(function: Callable[[], T], *, group: Group = Group.HOST) -> list[T]:
    """Call `function` on every rank and return all values; if it fails on one, raise its error on all. Collective.

    `function` must not be collective: ranks would wait for one that has failed. No rank returns before all are done.
    """
    value, failure = _attempt(function)
    outcomes = gather_objects((value, error_text(failure) if failure is not None else None), group=group)
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            suffix = f" (on rank {rank})" if world() > 1 else ""
            raise CheckpointError(error + suffix) from failure
    return [value for value, _ in outcomes]  # type: ignore[misc]  # no failure, so there is a value


def run_on_rank_0(function: Callable[[], T], *, group: Group = Group.HOST) -> T:
    """Call `function` on rank 0 and return its value on all ranks; if it fails, raise its error on all. Collective."""
    with _watched_by_rank_0() if group is Group.HOST else nullcontext():
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
    except Exception as error:  # of any type: the other ranks must learn of it
        return None, error
