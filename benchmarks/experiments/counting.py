"""How long a host waits for a step's counts, counted when it begins or before the backward pass of the one before.

python benchmarks/experiments/counting.py [--ranks 2 4] [--steps 50]

Ranks on this machine sum the counts of each step over gloo as a run does; a delay stands in for the ring of a large
world. A step is a forward and a backward pass, both of them sleeps. Also counts the sockets of a process.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from finetune.runtime import distributed
from finetune.runtime.processes import free_port

FORWARD_SECONDS, BACKWARD_SECONDS = 0.05, 0.1  # of a host that queues a short step, its update included
DELAYS_SECONDS = (0.0, 0.01, 0.08)
COUNTS = [1] * 15


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    print("ranks  delay ms  waited at the step's begin, ms  counted ahead, ms  sockets: host group, a full mesh")
    for num_ranks in options.ranks:
        found: Queue[tuple[list[tuple[float, float, float]], tuple[int, int]]] = multiprocessing.Queue()
        port = free_port()
        ranks = [
            multiprocessing.Process(target=_measure, args=(rank, num_ranks, port, options.steps, found))
            for rank in range(num_ranks)
        ]
        for each in ranks:
            each.start()
        rows, sockets = found.get()
        for each in ranks:
            each.join()
        for delay, begun, ahead in rows:
            print(f"{num_ranks:>5}  {delay * 1e3:>8.0f}  {begun * 1e3:>30.2f}  {ahead * 1e3:>17.2f}  {sockets}")


def _measure(rank: int, num_ranks: int, port: int, num_steps: int, found: "Queue[object]") -> None:
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks, timeout=timedelta(minutes=5))
    before = _num_sockets()
    distributed.open_host_group()
    lazily = _num_sockets()
    dist.new_group(backend="gloo")
    sockets = (lazily - before, _num_sockets() - lazily)
    rows = []
    for delay in DELAYS_SECONDS:
        start = partial(_start_late, delay)
        rows.append((delay, _waited(start, num_steps, is_ahead=False), _waited(start, num_steps, is_ahead=True)))
    if rank == 0:
        found.put((rows, sockets))
    dist.barrier()


def _waited(start: Callable[[], Callable[[], object]], num_steps: int, *, is_ahead: bool) -> float:
    """Return the median of the seconds that a step waits for its counts."""
    waits, wait = [], start()
    for _ in range(num_steps):
        began = time.perf_counter()
        (wait if is_ahead else start())()
        waits.append(time.perf_counter() - began)
        time.sleep(FORWARD_SECONDS)
        if is_ahead:
            wait = start()
        time.sleep(BACKWARD_SECONDS)
    if is_ahead:
        wait()
    return statistics.median(waits)


def _start_late(seconds: float) -> Callable[[], object]:
    if not seconds:
        return distributed.start_sum_counts(COUNTS)

    def run() -> None:
        time.sleep(seconds)
        distributed.sum_counts(COUNTS)

    thread = Thread(target=run)
    thread.start()
    return thread.join


def _num_sockets() -> int:
    return sum(
        str(each.readlink()).startswith("socket") for each in Path("/proc/self/fd").iterdir() if each.is_symlink()
    )


if __name__ == "__main__":
    main()
