"""The controller of the contestants: one of them works at a time, in an order drawn anew every round."""

import json
import os
import random
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 600.0
"""How long a contestant may be silent before it is given up."""


class ContestantDied(Exception):
    """A contestant ended, or fell silent, before it was done; the message holds the end of its log."""


class Contestant:
    """A process of its own that takes steps when it is told to; its log is `NAME.log` in the folder."""

    def __init__(self, name: str, *, command: Sequence[str], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name.replace(' ', '-')}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment(),
                start_new_session=True,
            )

    def say(self, message: Mapping[str, Any]) -> None:
        """Send a message; raises ContestantDied."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except OSError as error:
            raise self._died() from error

    def hear(self, *expected: str, patience_seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """Return its next message, which is at one of the expected points; raises ContestantDied."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(patience_seconds):
                raise self._died(f"has said nothing for {patience_seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        message: dict[str, Any] = json.loads(line)
        if message["at"] not in expected:
            raise self._died(f"is at {message['at']} instead of {' or '.join(expected)}")
        return message

    def kill(self) -> None:
        """End it and whatever it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _died(self, what: str = "") -> ContestantDied:
        if not what:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            what = f"ended with exit code {self._process.poll()}"
        tail = self.log.read_text(errors="replace")[-3000:]
        return ContestantDied(f"{self.name} {what}. The end of {self.log}:\n{tail}")


@dataclass
class Sheet:
    """What a contestant's steps have cost: a number a round."""

    seconds: list[float] = field(default_factory=list)  # of CPU
    tokens: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step, those of the warm-up included
    peak_bytes: int = 0

    def add(self, told: Mapping[str, Any]) -> None:
        """Take down a step."""
        self.seconds.append(told["seconds"])
        self.tokens.append(told["tokens"])
        self.targets.append(told["targets"])

    @property
    def token_seconds(self) -> list[float]:
        """Return CPU-seconds a token that is no padding, round by round."""
        return [seconds / tokens for seconds, tokens in zip(self.seconds, self.tokens, strict=True)]

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "targets": self.targets,
            "losses": self.losses,
            "peak_bytes": self.peak_bytes,
        }


class Controller:
    """Whoever is alive. A context: those that are left at its end are killed."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._seated: dict[str, Contestant] = {}

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_: object) -> None:
        for contestant in self._seated.values():
            contestant.kill()

    def seat(self, names: Iterable[str], *, at_once: int = 2) -> None:
        """Start those who are not there yet, so many at a time; returns when all have imported what they need."""
        starting: list[Contestant] = []
        for name in names:
            if name in self._seated:
                continue
            if len(starting) == at_once:
                starting.pop(0).hear("ready")
            self._seated[name] = Contestant(name, command=command(name), folder=self._folder)
            starting.append(self._seated[name])
        for contestant in starting:
            contestant.hear("ready")

    def dismiss(self) -> None:
        """Send everybody home."""
        for name in list(self._seated):
            self._seated.pop(name).kill()

    def play(
        self, workload: Path, names: Sequence[str], *, rounds: int, warm_up: int, takes_turns: bool = True
    ) -> dict[str, Sheet]:
        """Return what every contestant's steps cost on the workload; raises ContestantDied.

        A step of the warm-up is taken like every other, and not counted. Those who do not take turns run at once:
        their memory can be measured, and not their time.
        """
        players, sheets = [self._seated[name] for name in names], {name: Sheet() for name in names}
        _all(players, {"play": str(workload)}, "step")  # each waits for its first step
        for number in range(warm_up + rounds):
            self._chance.shuffle(players)
            for turn in [[player] for player in players] if takes_turns else [players]:
                told = _all(turn, {"go": True}, "step")
                for name in told if number >= warm_up else ():
                    sheets[name].add(told[name])
        for name, end in _all(players, {"go": True}, "end").items():  # the last step, whose cost nobody asks for
            sheets[name].losses, sheets[name].peak_bytes = end["losses"], end["peak_bytes"]
        return sheets


def _all(players: Sequence[Contestant], message: Mapping[str, Any], expected: str) -> dict[str, dict[str, Any]]:
    """Return what each of the players answers to the message, which they are all told at once."""
    for player in players:
        player.say(message)
    return {player.name: player.hear(expected) for player in players}


def command(name: str) -> list[str]:
    """Return the command of a contestant's process."""
    return [sys.executable, str(ROOT / "benchmarks" / "contestant.py"), name]


def environment() -> dict[str, str]:
    """Return the environment in which everybody runs: one thread, no network, no questions."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT)))),
    }
