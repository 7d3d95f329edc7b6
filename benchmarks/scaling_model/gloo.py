"""The cost model against processes of this machine: DDP and FSDP2 steps over gloo, beside what `doctor` measures here.

Everything that the model is given is measured in the same processes, minutes apart at most: what a rank computes while
the others compute, too (they share the processors), and the all-reduces by `doctor`'s own functions. What remains is
what the model says of it: bytes, pieces, hops, and what can be hidden.
"""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from finetune.commands.doctor.checks import bus_bandwidth
from finetune.commands.doctor.ranks import LinkFacts, measure_link
from finetune.commands.plan.assumptions import LAUNCH_SECONDS
from finetune.commands.plan.step_time import Cluster, Device, Work, step_time

WIDTH, LAYERS, TOKENS = 768, 8, 384
ROUNDS = 9
_WARM_UP = 2
_NEVER_WAITS = 1e15
"""Bandwidth of a memory that costs nothing: the update is part of what is measured as computation."""


@dataclass(frozen=True)
class Measured:
    """Steps on so many ranks, in seconds: medians of the slowest rank."""

    world: int
    computed: float
    steps: dict[str, float]
    modeled: dict[str, float]
    bytes_per_second: float


def measure(worlds: Sequence[int] = (1, 2, 3, 4)) -> list[Measured]:
    """Return what steps take on each number of ranks, and what the model makes of the link."""
    return [_measure(world) for world in worlds]


def _measure(world: int) -> Measured:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    spawn(_rank, args=(world, port, queue), nprocs=world)
    computed, steps, link = queue.get()
    modeled = {} if link is None else _modeled(world, computed, link)
    return Measured(world, computed, steps, modeled, 0.0 if link is None else bus_bandwidth(link, world=world))


def _modeled(world: int, computed: float, link: LinkFacts) -> dict[str, float]:
    parameters = LAYERS * WIDTH * WIDTH
    work = Work(
        num_tokens=TOKENS,
        num_microbatches=1,
        flops_per_token=6.0 * parameters,
        recomputed_flops_per_token=0.0,
        traffic_per_token=0.0,
        num_layers=LAYERS,
        num_parameters=parameters,
        num_trained=parameters,
        weight_bytes=4.0 * parameters,
        gradient_bytes=4.0 * parameters,
        trained_weight_bytes=4.0 * parameters,
    )
    smallest = max(0.0, link.all_reduce[0].seconds - LAUNCH_SECONDS)
    speed = bus_bandwidth(link, world=world)
    cluster = Cluster(world, world, speed, speed, hop_seconds=smallest / (2 * (world - 1)))
    device = Device(work.flops_per_token * TOKENS / computed, _NEVER_WAITS, _NEVER_WAITS)
    return {name: step_time(name, work, device=device, cluster=cluster).seconds for name in ("ddp", "fsdp2")}


def _rank(rank: int, world: int, port: int, queue: "torch.multiprocessing.SimpleQueue[object]") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        found = _steps(world)
        if rank == 0:
            queue.put(found)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _steps(world: int) -> tuple[float, dict[str, float], LinkFacts | None]:
    """Return the seconds of a step without communication, of steps with it, and the link. Collective."""
    alone = {"computed": _stepper(_layers())}
    if world == 1:
        return _in_turn(alone)["computed"], {}, None
    link = measure_link()
    sharded = _layers()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    together = {"ddp": _stepper(DistributedDataParallel(_layers())), "fsdp2": _stepper(sharded)}
    found = _in_turn({**alone, **together})
    return found["computed"], {name: found[name] for name in together}, link


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def _stepper(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    rows = torch.randn(TOKENS, WIDTH)

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _in_turn(steppers: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median time of each kind of step, that of the slowest rank. Collective.

    One follows the other in each round, so that what else the machine does slows all of them alike.
    """
    found: dict[str, list[float]] = {name: [] for name in steppers}
    for _ in range(_WARM_UP + ROUNDS):
        for name, step in steppers.items():
            dist.barrier()
            started = time.perf_counter()
            step()
            seconds = torch.tensor([time.perf_counter() - started])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            found[name].append(float(seconds))
    return {name: median(times[_WARM_UP:]) for name, times in found.items()}
