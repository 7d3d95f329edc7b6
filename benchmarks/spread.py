"""What choices give that are made where a model is spread over processes, each against the first of its kind.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/spread.py [ROUNDS]

DDP's `static_graph`; FSDP2 whose parameters are split again after each pass, stay whole from forward to backward pass,
and stay whole over the microbatches of a step; the reduction of a step's counts by itself. Loops written by hand on
gloo, one step at a time in an order drawn anew each round.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from contest.finding import Spread
from contest.workloads import Sizes

LENGTH, MICROBATCHES = 128, 4
Step = Callable[[], None]


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ids = torch.randint(0, Sizes().vocabulary, (MICROBATCHES, LENGTH))
    kinds: Mapping[str, Mapping[str, Step]] = {
        "ddp": {name: ddp(ids, is_static=name == "static graph") for name in ("plain", "static graph")},
        "fsdp2": {
            "split after each pass": fsdp2(ids, splits_after_forward=True, stays_whole=False),
            "whole until the backward pass": fsdp2(ids, splits_after_forward=False, stays_whole=False),
            "whole over the step": fsdp2(ids, splits_after_forward=False, stays_whole=True),
        },
    }
    for kind, steps in kinds.items():
        compare(kind, steps, rounds=rounds)
    count()
    dist.destroy_process_group()


def ddp(ids: torch.Tensor, *, is_static: bool) -> Step:
    """Return a step of half of the rows."""
    model: Any = DistributedDataParallel(_model(), gradient_as_bucket_view=True, static_graph=is_static)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        model(input_ids=ids[:2], labels=ids[:2]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(ids: torch.Tensor, *, splits_after_forward: bool, stays_whole: bool) -> Step:
    """Return a step of a microbatch for each row."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = _model()
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=splits_after_forward)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        for number, row in enumerate(ids):
            is_last = number == len(ids) - 1
            model.set_requires_gradient_sync(is_last)
            if stays_whole:
                model.set_reshard_after_backward(is_last)
            model(input_ids=row[None], labels=row[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(kind: str, steps: Mapping[str, Step], *, rounds: int) -> None:
    """Print what a step costs, as a ratio to the first of its kind."""
    chance, first = random.Random(1), next(iter(steps))
    taken: dict[str, list[tuple[float, float]]] = {name: [_timed(step)] for name, step in steps.items()}
    for _ in range(rounds):
        for name in chance.sample(list(steps), len(steps)):
            taken[name].append(_timed(steps[name]))
    for name in steps:
        of_first = [
            Spread.of_ratios(*([each[place] for each in taken[one][1:]] for one in (name, first))) for place in (0, 1)
        ]
        _say(f"{kind}, {name}: wall {of_first[0]}, CPU {of_first[1]} of {first}")


def count(times: int = 500) -> None:
    """Print what the reduction of eight whole numbers costs."""
    numbers, taken = torch.zeros(8, dtype=torch.int64), []
    for _ in range(times):
        taken.append(_timed(lambda: dist.all_reduce(numbers)))
    wall, cpu = (1000 * statistics.median(each[place] for each in taken) for place in (0, 1))
    _say(f"counts: {wall:.2f} ms of wall, {cpu:.2f} ms of CPU")


def _timed(step: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of wall and of this process' CPU."""
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - wall, time.process_time() - cpu


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**Sizes().values()))


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
