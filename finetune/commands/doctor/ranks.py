"""The ranks of a launch: the speed of the link between them, and differences of clocks, versions and devices."""

import os
import platform
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from finetune.commands.doctor.findings import Finding, Severity, finding
from finetune.runtime import distributed
from finetune.runtime.environment import nccl_version, package_versions


@dataclass(frozen=True)
class RankFacts:
    """One process of a launch."""

    rank: int
    hostname: str
    local_rank: int = 0
    arrived_seconds: float = 0.0  # after the first
    clock_offset_seconds: float = 0.0  # of its machine, relative to rank 0
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    nccl: str | None = None
    device: str = "cpu"
    flops_per_second: float = 0.0  # of a matrix product


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
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True)
class LinkFacts:
    """Measurements between the ranks."""

    backend: str
    all_reduce: tuple[AllReduceSpeed, ...]
    pairs: tuple[PairSpeed, ...] = ()


CPU_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
GPU_SIZES = (4 << 10, 256 << 10, 16 << 20, 256 << 20)
MAX_WORLD_FOR_ALL_PAIRS = 8
_SECONDS_PER_SIZE = 0.25
_MAX_REPEATS = 200
_WARM_UP = 2
_CLOCK_ROUNDS = 5
_LATENCY_BYTES = 4 << 10


def gather_rank(*, arrived_seconds: float) -> RankFacts:
    """Return the facts of this rank, with the offset of its clock and its speed in a matrix product. Collective."""
    device = _device()
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    multiply = partial(torch.mm, matrix, matrix)
    _timed(multiply, repeats=_WARM_UP)
    seconds = median(_timed(multiply, repeats=4) for _ in range(5))
    return RankFacts(
        rank=distributed.rank(),
        hostname=socket.gethostname(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        arrived_seconds=arrived_seconds,
        clock_offset_seconds=measure_clock_offset(),
        python=platform.python_version(),
        packages=package_versions(),
        torch_cuda=torch.version.cuda,
        nccl=nccl_version(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        flops_per_second=2 * size**3 / seconds,
    )


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
            latency = _round_trip(pair, device, num_bytes=_LATENCY_BYTES, repeats=20) / 2
            seconds = _round_trip(pair, device, num_bytes=sizes[-2], repeats=4) / 2
            if rank == pair[0]:
                pairs.append(PairSpeed(*pair, latency, sizes[-2] / seconds))
        dist.barrier()
    gathered = [pair for measured in distributed.gather_objects(pairs) for pair in measured]
    backend = "gloo" if device.type == "cpu" else "nccl"
    return LinkFacts(backend, tuple(all_reduce), tuple(sorted(gathered, key=lambda pair: (pair.first, pair.second))))


def pairs_to_measure(world: int) -> Sequence[tuple[int, int]]:
    """Return all pairs of a small world, and the neighbors of a large one.

    >>> pairs_to_measure(3)
    [(0, 1), (0, 2), (1, 2)]
    """
    if world <= MAX_WORLD_FOR_ALL_PAIRS:
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


def measure_clock_offset() -> float:
    """Return the offset of this rank's clock from rank 0's, with an error of about a message's time. Collective.

    As in NTP, the fastest of several answers counts as the time halfway between request and answer.
    """
    rank, own = dist.get_rank(), 0.0
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            answers = []
            answer = torch.zeros(1, dtype=torch.float64)
            for _ in range(_CLOCK_ROUNDS):
                sent = time.time()
                dist.send(answer, other)
                dist.recv(answer, other)
                received = time.time()
                answers.append((received - sent, float(answer[0]) - (sent + received) / 2))
            dist.send(torch.tensor([min(answers)[1]], dtype=torch.float64), other)
        elif rank == other:
            offset = torch.zeros(1, dtype=torch.float64)
            for _ in range(_CLOCK_ROUNDS):
                dist.recv(offset, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
            dist.recv(offset, 0)
            own = float(offset[0])
    return own


MAX_CLOCK_SECONDS = 1.0
MAX_LATE_SECONDS = 10.0
_SLOW_RANK = 0.7
"""Share of the median speed below which a rank slows down the others."""

_MUST_AGREE = ("finetune", "torch", "accelerate", "transformers", "deepspeed", "peft")


def check_ranks(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    """Yield the differences between ranks."""
    if len(ranks) < 2:
        return
    yield from _versions(ranks)
    offsets = {rank.hostname: rank.clock_offset_seconds for rank in ranks}
    wrong = {host: offset for host, offset in offsets.items() if abs(offset) > MAX_CLOCK_SECONDS}
    if wrong:
        yield finding(
            "clock",
            what="clocks differ from rank 0's: "
            + ", ".join((f"{host} by {offset:+.1f} s" for host, offset in wrong.items())),
        )
    values = {rank.rank: rank.device for rank in ranks}
    on_cpu = [rank for rank, device in values.items() if device == "cpu"]
    if 0 < len(on_cpu) < len(ranks):
        yield finding("rank-without-gpu", on_cpu=", ".join(map(str, on_cpu)), by_value=_by_value(values))
    elif len(set(values.values())) > 1:
        yield finding("rank-devices", by_value=_by_value(values))
    late = [rank for rank in ranks if rank.arrived_seconds > MAX_LATE_SECONDS]
    if late:
        yield finding(
            "late-rank",
            what="late ranks: "
            + ", ".join(f"rank {rank.rank} on {rank.hostname} by {rank.arrived_seconds:.0f} s" for rank in late),
        )
    speeds: dict[str, float] = {}
    for rank in ranks:  # ranks on one CPU share its time: the fastest of a machine counts
        name = rank.hostname if rank.device == "cpu" else f"rank {rank.rank} ({rank.hostname})"
        speeds[name] = max(speeds.get(name, 0.0), rank.flops_per_second)
    typical = median(speeds.values())
    for name, speed in speeds.items():
        if speed < _SLOW_RANK * typical:
            yield finding("slow-rank", name=name, share=speed / typical)


def _versions(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    packages = {name for rank in ranks for name in rank.packages}
    readers: Mapping[str, Callable[[RankFacts], Any]] = {
        "python": lambda rank: rank.python.rpartition(".")[0],
        "CUDA of torch": lambda rank: rank.torch_cuda,
        "NCCL": lambda rank: rank.nccl,
    }
    for name in sorted(packages):
        values = {rank.rank: rank.packages.get(name, "missing") for rank in ranks}
        if len(set(values.values())) > 1:
            severity = Severity.MUST_FIX if name in _MUST_AGREE else Severity.SHOULD_FIX
            yield finding(
                "versions/package",
                severity=severity,
                name=name,
                by_value=_by_value(values),
                most_common=Counter(values.values()).most_common(1)[0][0],
            )
    for name, read in readers.items():
        values = {rank.rank: str(read(rank)) for rank in ranks}
        if len(set(values.values())) > 1:
            yield finding("versions/build", name=name, by_value=_by_value(values))


def _by_value(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return "; ".join(f"{value} on rank {_ranges(numbers)}" for value, numbers in ranks.items())


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")
