"""Contestants of two processes each: one pair at a time takes a step, and all others wait on their pipes."""

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.runtime.processes import free_port

from contest.controller import ROOT, Contestant

WORLD = 2


@dataclass
class PairSheet:
    """What a pair's steps have cost: a number a round."""

    seconds: list[float] = field(default_factory=list)  # of CPU, both ranks'
    wall_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {"seconds": self.seconds, "wall_seconds": self.wall_seconds, "losses": self.losses}


class Pairs:
    """The pairs that are alive. A context: they are killed at its end."""

    def __init__(self, names: Sequence[str], *, folder: Path, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._pairs: dict[str, list[Contestant]] = {}
        for name in names:
            self._pairs[name] = _started(name, folder)
            self._hear(name, "ready")  # a pair at a time: two processes fill two cores

    def __enter__(self) -> "Pairs":
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._pairs.values():
            for rank in pair:
                rank.kill()

    def play(
        self, workload: Path, strategy: str, names: Sequence[str], *, rounds: int, warm_up: int
    ) -> dict[str, PairSheet]:
        """Return what the pairs' steps cost on the workload under the strategy; raises ContestantDied."""
        for name in names:
            self._log(name, {"play": str(workload), "strategy": strategy})
            self._hear(name, "step")
        sheets, order = {name: PairSheet() for name in names}, list(names)
        for number in range(warm_up + rounds):
            self._chance.shuffle(order)
            for name in order:
                started = time.perf_counter()
                self._log(name, {"go": True})
                told = self._hear(name, "step")
                if number >= warm_up:
                    sheets[name].wall_seconds.append(time.perf_counter() - started)
                    sheets[name].seconds.append(sum(each["seconds"] for each in told))
        for name in names:  # the last step, whose cost nobody asks for
            self._log(name, {"go": True})
            sheets[name].losses = _mean_losses(name, self._hear(name, "end"))
        return sheets

    def _log(self, name: str, message: dict[str, Any]) -> None:
        for rank in self._pairs[name]:
            rank.say(message)

    def _hear(self, name: str, expected: str) -> list[dict[str, Any]]:
        return [rank.hear(expected) for rank in self._pairs[name]]


def rank_command(name: str) -> list[str]:
    """Return the command of one rank's process."""
    return [sys.executable, str(ROOT / "benchmarks" / "rank.py"), name]


def _started(name: str, folder: Path) -> list[Contestant]:
    place = {"WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        Contestant(
            f"{name} rank {rank}",
            command=[
                "/usr/bin/env",
                *(f"{key}={value}" for key, value in {**place, "RANK": rank, "LOCAL_RANK": rank}.items()),
                *rank_command(name),
            ],
            folder=folder,
        )
        for rank in range(WORLD)
    ]


def _mean_losses(name: str, told: Sequence[dict[str, Any]]) -> list[float]:
    """Return each step's mean loss over both ranks' targets, from what every rank says of its share."""
    sums = [sum(losses) for losses in zip(*(each["losses"] for each in told), strict=True)]
    return [each / WORLD for each in sums] if name == "trainer" else sums  # it multiplies by the number of processes
