"""All-reduces over all ranks, messages between two, clocks and matrix products, each in less than a second."""

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from finetune.commands.doctor.facts.launch import AllReduceSpeed, LinkFacts, PairSpeed
from finetune.runtime import distributed

CPU_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
GPU_SIZES = (4 << 10, 256 << 10, 16 << 20, 256 << 20)
MAX_WORLD_FOR_ALL_PAIRS = 8

_SECONDS_EACH = 0.25
_MAX_REPEATS = 200
_WARM_UP = 2
_CLOCK_ROUNDS = 5
_LATENCY_BYTES = 4 << 10


def measure_link() -> LinkFacts:
    """Return what all-reduces and messages take. Collective."""
    device = _device()
    sizes = CPU_SIZES if device.type == "cpu" else GPU_SIZES
    all_reduce = tuple(AllReduceSpeed(size, _all_reduce_seconds(size, device)) for size in sizes)
    pairs = [_pair_speed(pair, device, size=sizes[-2]) for pair in pairs_to_measure(dist.get_world_size())]
    merged = {(each.first, each.second): each for found in distributed.gather_objects(pairs) for each in found if each}
    backend = "gloo" if device.type == "cpu" else "nccl"
    return LinkFacts(backend, all_reduce, tuple(merged[pair] for pair in sorted(merged)))


def pairs_to_measure(world: int) -> Sequence[tuple[int, int]]:
    """Return all pairs of a small world, and the neighbours of a large one.

    >>> pairs_to_measure(3)
    [(0, 1), (0, 2), (1, 2)]
    """
    if world <= MAX_WORLD_FOR_ALL_PAIRS:
        return list(combinations(range(world), 2))
    return [(rank, rank + 1) for rank in range(world - 1)]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _all_reduce_seconds(num_bytes: int, device: torch.device) -> float:
    """Return the mean time of an all-reduce, that of the slowest rank. Collective."""
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)

    def reduce() -> None:
        dist.all_reduce(tensor)

    _timed(reduce, repeats=_WARM_UP)
    first = _timed(reduce, repeats=1)
    repeats = distributed.broadcast_object(min(_MAX_REPEATS, max(3, int(_SECONDS_EACH / max(first, 1e-6)))))
    dist.barrier()
    return max(distributed.gather_objects(_timed(reduce, repeats=repeats)))


def _timed(function: Callable[[], None], *, repeats: int) -> float:
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


def _pair_speed(pair: tuple[int, int], device: torch.device, *, size: int) -> PairSpeed | None:
    """Return the speed of messages to and fro, on the first rank of the pair; others wait. Collective."""
    found = None
    if dist.get_rank() in pair:
        latency = _round_trip(pair, device, num_bytes=_LATENCY_BYTES, repeats=20) / 2
        seconds = _round_trip(pair, device, num_bytes=size, repeats=4) / 2
        found = PairSpeed(*pair, latency, size / seconds) if dist.get_rank() == pair[0] else None
    dist.barrier()
    return found


def _round_trip(pair: tuple[int, int], device: torch.device, *, num_bytes: int, repeats: int) -> float:
    tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)
    is_first = dist.get_rank() == pair[0]
    other = pair[1] if is_first else pair[0]

    def exchange() -> None:
        for sends in (is_first, not is_first):
            (dist.send if sends else dist.recv)(tensor, other)

    _timed(exchange, repeats=_WARM_UP)
    return min(_timed(exchange, repeats=1) for _ in range(repeats))  # what else the machine does is not the link's


def measure_clock_offset() -> float:
    """Return how far this rank's clock is ahead of rank 0's, to about the time of a message. Collective.

    As NTP does: of several questions the one that was answered fastest counts, halfway between asking and answer.
    """
    rank, own = dist.get_rank(), 0.0
    for other in range(1, dist.get_world_size()):
        if rank == 0:
            offset = torch.tensor([_ask_clock(other)], dtype=torch.float64)
            dist.send(offset, other)
        elif rank == other:
            offset = torch.zeros(1, dtype=torch.float64)
            for _ in range(_CLOCK_ROUNDS):
                dist.recv(offset, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
            dist.recv(offset, 0)
            own = float(offset[0])
    return own


def _ask_clock(other: int) -> float:
    answers = []
    answer = torch.zeros(1, dtype=torch.float64)
    for _ in range(_CLOCK_ROUNDS):
        asked = time.time()
        dist.send(answer, other)
        dist.recv(answer, other)
        answered = time.time()
        answers.append((answered - asked, float(answer[0]) - (asked + answered) / 2))
    return min(answers)[1]


def measure_flops() -> float:
    """Return the floating-point operations per second of a large matrix product: bf16 on a GPU, fp32 on a CPU."""
    device = _device()
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left = torch.ones(size, size, dtype=dtype, device=device)

    def multiply() -> None:
        torch.mm(left, left)

    _timed(multiply, repeats=_WARM_UP)
    seconds = median(_timed(multiply, repeats=4) for _ in range(5))
    return 2 * size**3 / seconds
