"""The ranks of a launch: the speed of the links between them, and facts that may differ."""

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from finetune.errors import LostContact, UserError
from finetune.runtime import distributed
from finetune.runtime.environment import nccl_version, package_versions


@dataclass(frozen=True)
class RankFacts:
    """One process of a launch."""

    rank: int
    hostname: str
    local_rank: int = 0
    clock_offset_seconds: float = 0.0  # of its machine, relative to rank 0
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AllReduceSpeed:
    """All-reduces of one size over all ranks."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class PairSpeed:
    """Messages between two ranks."""

    first: int
    second: int
    bytes_per_second: float


@dataclass(frozen=True)
class LinkFacts:
    """Measurements between the ranks."""

    backend: str
    all_reduce: tuple[AllReduceSpeed, ...]
    pairs: tuple[PairSpeed, ...] = ()


def connect(variables: Mapping[str, str], *, seconds: float) -> None:
    """Create the process group of all launched ranks: gloo, and NCCL on GPUs. Collective.

    Raises LostContact if a rank does not arrive in time, or cannot be reached.
    """
    local, num_devices = int(variables.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if num_devices and local >= num_devices:
        raise UserError(
            f"local rank {local} of {socket.gethostname()} has no GPU: torch sees {num_devices} there, and NCCL "
            f"refuses two ranks on one. Launch {num_devices} per machine, or check CUDA_VISIBLE_DEVICES."
        )
    if num_devices:
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if num_devices else "gloo"
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise LostContact(
            f"rank {variables['RANK']} on {socket.gethostname()} has not met the other ranks within {seconds:g} s: "
            f"{str(error).splitlines()[0]}\n"
            "  Check whether all of them were started (machine_rank, num_machines, num_processes, main_process_ip and "
            "main_process_port of the accelerate config), and whether a firewall is between them. `export "
            "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0` names the interface of their network (`ip -br address`); "
            "`--wait SECONDS` waits longer."
        ) from error


def gather_rank() -> RankFacts:
    """Return the facts of this rank, with the offset of its clock. Collective."""
    builds = {"python": platform.python_version(), "CUDA of torch": torch.version.cuda, "NCCL": nccl_version()}
    return RankFacts(
        rank=distributed.rank(),
        hostname=socket.gethostname(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        clock_offset_seconds=_measure_clock_offset(),
        versions=package_versions() | {name: str(version) for name, version in builds.items()},
    )


CPU_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
GPU_SIZES = (4 << 10, 256 << 10, 16 << 20, 256 << 20)
_MAX_WORLD_FOR_ALL_PAIRS = 8
_SECONDS_PER_SIZE = 0.25
_MAX_REPEATS = 200
_WARM_UP = 2
_CLOCK_ROUNDS = 5


def measure_link() -> LinkFacts:
    """Return the speed of all-reduces over all ranks and of messages between two. Collective."""
    device, rank = _device(), dist.get_rank()
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    all_reduce = []
    for size in sizes:  # of each, the mean time on the slowest rank
        reduce = partial(dist.all_reduce, torch.zeros(size // 4, dtype=torch.float32, device=device))
        _timed(reduce, repeats=_WARM_UP)
        first = _timed(reduce, repeats=1)
        repeats = distributed.broadcast_object(min(_MAX_REPEATS, max(3, int(_SECONDS_PER_SIZE / max(first, 1e-6)))))
        dist.barrier()
        all_reduce.append(AllReduceSpeed(size, max(distributed.gather_objects(_timed(reduce, repeats=repeats)))))
    pairs = []
    for pair in pairs_to_measure(dist.get_world_size()):  # the other ranks wait
        if rank in pair:
            seconds = _round_trip(pair, device, num_bytes=sizes[-2], repeats=4) / 2
            if rank == pair[0]:
                pairs.append(PairSpeed(*pair, sizes[-2] / seconds))
        dist.barrier()
    gathered = [pair for measured in distributed.gather_objects(pairs) for pair in measured]
    backend = "gloo" if device.type == "cpu" else "nccl"
    return LinkFacts(backend, tuple(all_reduce), tuple(sorted(gathered, key=lambda pair: (pair.first, pair.second))))


def pairs_to_measure(world: int) -> Sequence[tuple[int, int]]:
    """Return all pairs of a small world, and the neighbors of a large one.

    >>> pairs_to_measure(3), len(pairs_to_measure(64))
    ([(0, 1), (0, 2), (1, 2)], 63)
    """
    if world <= _MAX_WORLD_FOR_ALL_PAIRS:
        return list(combinations(range(world), 2))
    return [(rank, rank + 1) for rank in range(world - 1)]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _timed(function: Callable[[], Any], *, repeats: int) -> float:
    """Return the mean seconds of a call, to the end of its work on the device."""
    _synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        function()
    _synchronize()
    return (time.perf_counter() - started) / repeats


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _round_trip(pair: tuple[int, int], device: torch.device, *, num_bytes: int, repeats: int) -> float:
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    is_first = dist.get_rank() == pair[0]
    other = pair[1] if is_first else pair[0]

    def exchange() -> None:
        for sends in (is_first, not is_first):
            (dist.send if sends else dist.recv)(tensor, other)

    _timed(exchange, repeats=_WARM_UP)
    return min(_timed(exchange, repeats=1) for _ in range(repeats))  # other work of the machine does not count


def _measure_clock_offset() -> float:
    """Return the offset of this rank's clock from rank 0's, with an error of about a message's time. Collective.

    As in NTP, the fastest of several answers counts as the time halfway between request and answer.
    """
    rank, times = dist.get_rank(), torch.zeros(1, dtype=torch.float64)
    offsets = [0.0] * dist.get_world_size()
    for other in range(1, len(offsets)):
        answers = []
        for _ in range(_CLOCK_ROUNDS):
            sent = time.time()
            if rank == 0:
                dist.send(times, other)
                dist.recv(times, other)
                received = time.time()
                answers.append((received - sent, float(times[0]) - (sent + received) / 2))
            elif rank == other:
                dist.recv(times, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
        if answers:
            offsets[other] = min(answers)[1]
    return distributed.broadcast_object(offsets)[rank]
