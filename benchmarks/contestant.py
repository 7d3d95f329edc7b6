"""A contestant of compare.py in a process of its own: `python contestant.py NAME`, which plays what it is told to."""

import sys
from importlib import import_module
from pathlib import Path

import torch

from contest.seat import taken_seat

MODULES = {"bare": "plain", "accelerate": "plain", "trainer": "peers", "trl": "peers", "ours": "product"}


def main(name: str) -> None:
    """Wait to be told a workload's folder, train it step by step, and wait for the next one."""
    with taken_seat() as seat:
        module = import_module(f"contest.{MODULES[name.split()[0]]}")
        seat.say({"at": "ready"})
        while True:
            folder = Path(seat.hear()["play"])
            seat.begin()
            module.play(name, folder, seat)
            seat.end()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
