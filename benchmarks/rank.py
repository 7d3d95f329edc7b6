"""One rank of a contestant with several processes: `python rank.py NAME`, its number in the environment.

It is told a workload's folder and a strategy. The strategies follow one another in the same processes, as starting
those takes longest.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch

from contest.launched import forget, launched
from contest.seat import taken_seat

MODULES = {"bare": "hand_written", "trainer": "trainer_rank", "ours": "product_rank"}


def main(name: str) -> None:
    """Wait to be told what to train, train it step by step, and wait for the next."""
    with taken_seat() as seat:
        module = import_module(f"contest.{MODULES[name]}")
        seat.say({"at": "ready"})
        while True:
            told = seat.hear()
            seat.begin()
            with launched(told["strategy"]):
                module.play(told["strategy"], Path(told["play"]), seat)
            seat.end()
            forget()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
