"""The controller of the competitors: one of them takes a step at a time, in an order drawn anew every round."""

import json
import os
import random
import runpy
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from finetune.runtime.processes import free_loopback_port

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600.0
"""How long a competitor may be silent before it is given up."""


class CompetitorFailed(Exception):
    """A competitor ended, or fell silent, before it was done; the message holds the end of its log."""


class Process:
    """One process of a competitor; its log is `NAME.log` in the folder."""

    def __init__(self, name: str, *, competitor: str, folder: Path, variables: Mapping[str, str]) -> None:
        self.name = name
        self.log = folder / f"{name.replace(' ', '-')}.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                **_program("comparison.worker", competitor, variables=variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                start_new_session=True,
            )

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; raises CompetitorFailed."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except OSError as error:
            raise self._failed() from error

    def receive(self, expected: str) -> dict[str, Any]:
        """Return its next message, which is sent at the expected point; raises CompetitorFailed."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(TIMEOUT_SECONDS):
                raise self._failed(f"has been silent for {TIMEOUT_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        message: dict[str, Any] = json.loads(line)
        if message["at"] != expected:
            raise self._failed(f"is at {message['at']} instead of {expected}")
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

    def _failed(self, what: str = "") -> CompetitorFailed:
        if not what:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            what = f"ended with exit code {self._process.poll()}"
        tail = self.log.read_text(errors="replace")[-3000:]
        return CompetitorFailed(f"{self.name} {what}. The end of {self.log}:\n{tail}")


@dataclass
class StepCosts:
    """What a competitor's steps have cost: a number a round."""

    seconds: list[float] = field(default_factory=list)  # of CPU, of all its processes
    tokens: list[int] = field(default_factory=list)  # that are no padding
    targets: list[int] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step, those of the warm-up included
    peak_bytes: int = 0  # of its largest process

    @property
    def seconds_per_token(self) -> list[float]:
        """Return CPU-seconds a token that is no padding, round by round."""
        return [seconds / tokens for seconds, tokens in zip(self.seconds, self.tokens, strict=True)]

    def add(self, messages: Sequence[Mapping[str, Any]], *, wall_seconds: float) -> None:
        """Add a step, of which each process has sent its share."""
        for name in ("seconds", "tokens", "targets"):
            getattr(self, name).append(sum(each[name] for each in messages))
        self.wall_seconds.append(wall_seconds)

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


class Controller:
    """The competitors that are alive. A context: those that are left at its end are killed."""

    def __init__(self, folder: Path, *, seed: int = 0, num_processes: int = 1) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._num_processes = num_processes
        self._alive: dict[str, list[Process]] = {}

    def __enter__(self) -> "Controller":
        return self

    def __exit__(self, *_: object) -> None:
        for processes in self._alive.values():
            for process in processes:
                process.kill()

    def start(self, names: Iterable[str]) -> None:
        """Start those that are not alive yet, two processes at a time; returns when all have done their imports."""
        starting: list[str] = []
        for name in names:
            if name in self._alive:
                continue
            if len(starting) * self._num_processes >= 2:
                self._receive(starting.pop(0), "ready")
            self._alive[name] = self._started(name)
            starting.append(name)
        for name in starting:
            self._receive(name, "ready")

    def measure(
        self,
        workload: Path,
        names: Sequence[str],
        *,
        rounds: int,
        warm_up: int,
        strategy: str | None = None,
        takes_turns: bool = True,
    ) -> dict[str, StepCosts]:
        """Return what every competitor's steps cost on the workload; raises CompetitorFailed.

        A step of the warm-up is taken like every other, and not counted. Those that do not take turns run at once:
        their memory can be measured, and not their time.
        """
        order, costs = list(names), {name: StepCosts() for name in names}
        self._take(order, {"workload": str(workload), "strategy": strategy}, "step")  # each waits for its first step
        for number in range(warm_up + rounds):
            self._random.shuffle(order)
            for turn in [[name] for name in order] if takes_turns else [order]:
                started = time.perf_counter()
                for name, messages in self._take(turn, {"go": True}, "step").items():
                    if number >= warm_up:
                        costs[name].add(messages, wall_seconds=time.perf_counter() - started)
        for name, ends in self._take(order, {"go": True}, "end").items():  # the last step, whose cost is not known
            costs[name].losses = [sum(losses) for losses in zip(*(end["losses"] for end in ends), strict=True)]
            costs[name].peak_bytes = max(end["peak_bytes"] for end in ends)
        return costs

    def _take(self, names: Sequence[str], message: Mapping[str, Any], expected: str) -> dict[str, list[dict[str, Any]]]:
        """Return what each of them answers to the message, which is sent to all at once."""
        for name in names:
            for process in self._alive[name]:
                process.send(message)
        return {name: self._receive(name, expected) for name in names}

    def _receive(self, name: str, expected: str) -> list[dict[str, Any]]:
        return [process.receive(expected) for process in self._alive[name]]

    def _started(self, name: str) -> list[Process]:
        if self._num_processes == 1:
            return [Process(name, competitor=name, folder=self._folder, variables={})]
        world = str(self._num_processes)
        shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
        shared["MASTER_PORT"] = str(free_loopback_port())
        return [
            Process(
                f"{name} rank {rank}",
                competitor=name,
                folder=self._folder,
                variables={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self._num_processes)
        ]


def run_script(module: str, *arguments: object, seconds: int = 900) -> dict[str, Any]:
    """Return the figures that a module has left in the folder, its first argument; raises CompetitorFailed."""
    folder = Path(str(arguments[0]))
    log = folder / f"{module.rpartition('.')[2]}.log"
    with log.open("w") as stream:
        program = _program(module, *map(str, arguments))
        try:
            code: object = subprocess.run(**program, stdout=stream, stderr=stream, cwd=ROOT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {seconds} s"
    if code != 0:
        raise CompetitorFailed(f"{module} ended with exit code {code}:\n{log.read_text()[-3000:]}")
    figures = folder / "figures.json"
    return dict(json.loads(figures.read_text())) if figures.exists() else {}


_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Have the processes that follow be forks of this one, which imports the modules: their memory says nothing."""
    os.environ.update(environment())
    _preloaded.extend(import_module(name).__name__ for name in modules)


def _program(module: str, *arguments: str, variables: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Return the arguments of Popen that run a module."""
    program = {"args": [sys.executable, "-m", module, *arguments], "env": {**environment(), **variables}}
    if not _preloaded:
        return program

    def run() -> None:
        os.closerange(3, 4096)  # among them what Popen waits for: nothing is executed
        os.environ.update(variables)
        sys.argv = [module, *arguments]
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except BaseException:  # this process must not go on as its parent
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)

    return {**program, "preexec_fn": run}


def environment() -> dict[str, str]:
    """Return the environment in which everybody runs: one thread, no network, no questions."""
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "benchmarks"), inherited))),
    }
