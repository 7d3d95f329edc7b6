"""How often a restart within torchelastic's own agents works with gloo, on hosts that are network namespaces.

    python benchmarks/elastic_restarts.py [--tries 6]       # needs root; prints a table

Two hosts of 2 ranks each under `torchrun --nnodes 1:2 --max-restarts 3` add up a number 100 times. At the 30th time
one rank is killed, or a host is lost: the second one, or the one on which torchelastic's rendezvous lives. A try has
worked when the ranks that are left end with exit code 0 within 150 s; a worker does nothing but `all_reduce`, so
nothing of this package has a part in it.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))  # the cluster of the tests

from tests.launch.cluster import Host, cluster

ROUNDS, FAULT_AT = 100, 30
FAULTS = ("a rank is killed", "the second host is lost", "the host of the rendezvous is lost")
_SECONDS = 150.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=6)
    parser.add_argument("--worker", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        add_up(options.worker)
        return
    print(
        f"torch {torch.__version__}, {options.tries} tries each\n\n"
        "| fault | worked | seconds until the end |\n|---|---|---|"
    )
    for fault in FAULTS:
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(one_try, [fault] * options.tries))
        seconds = ", ".join(f"{each:.0f}" if each is not None else "-" for each in outcomes)
        worked = sum(each is not None for each in outcomes)
        print(f"| {fault} | {worked} of {options.tries} | {seconds} |", flush=True)


def one_try(fault: str) -> float | None:
    """Return the seconds from the fault to the end of all ranks that are left; None where they fail or never end."""
    with tempfile.TemporaryDirectory() as name, cluster(2) as hosts:
        folder = Path(name)
        for host in hosts:
            launch(host, folder, main_address=hosts[0].address)
        wait_for(lambda: all(round_of(folder, rank) >= FAULT_AT for rank in range(4)))
        began = time.monotonic()
        if fault == FAULTS[0]:
            os.kill(int((folder / "rank-3").read_text().split()[1]), signal.SIGKILL)
        else:
            hosts[1 if fault == FAULTS[1] else 0].kill()
        left = [program for host in hosts for program in host.programs]
        wait_for(lambda: all(program.poll() is not None for program in left))
        if left and all(program.returncode == 0 for program in left):
            return time.monotonic() - began
        return None


def launch(host: Host, folder: Path, *, main_address: str) -> None:
    words = [
        *("-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{main_address}:29411", "--rdzv-id", "x"),
        *("--rdzv-conf", f"is_host={int(host.address == main_address)}"),
        *("--local-addr", host.address, __file__, "--worker", str(folder)),
    ]
    host.begin(*words, log=folder / f"{host.name}.log", GLOO_SOCKET_IFNAME="eth0")


def add_up(folder: Path) -> None:
    """Add up a number over all ranks, again and again, and write down how often."""
    dist.init_process_group("gloo")
    path = folder / f"rank-{dist.get_rank()}"
    for each in range(ROUNDS):
        dist.all_reduce(torch.ones(1000))
        path.write_text(f"{each} {os.getpid()}")
        time.sleep(0.02)
    dist.destroy_process_group()


def round_of(folder: Path, rank: int) -> int:
    try:
        return int((folder / f"rank-{rank}").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return -1


def wait_for(is_so: object) -> None:
    deadline = time.monotonic() + _SECONDS
    while not is_so() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.05)


if __name__ == "__main__":
    main()
