"""A run of `finetune launch ray` on hosts, what disturbs it, and the comparison with an undisturbed one."""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from finetune.commands.launch.ray import HEAD_SETTINGS
from finetune.report.history import read_events
from finetune.runtime.supervision import heartbeat
from tests import launching
from tests.launch.cluster import Host, read_status, until

STEPS = 90
RESULTS = "FINETUNE_HOSTS_RESULTS"
"""The variable that names a file to which each run adds a line, for `benchmarks/hosts.py`."""

_PACE = "; ".join(f"data step={step} do=sleep seconds=0.5" for step in range(1, STEPS + 1))
"""A host that returns finds the run still going: Ray looks for new hosts every 30 s."""

_PORT = 6379
_TIMEOUT_SECONDS = 400.0

LORA = {"lora": {"rank": 4, "alpha": 8.0}}


def write_job(folder: Path, name: str, *, hang_seconds: int = 60, **model: object) -> Path:
    """Write a small job, whose global batch can be shared by 1, 2, 3, 4 and 6 ranks; returns its path."""
    rows = folder / "rows.jsonl"
    if not rows.exists():
        texts = [f"{number} is followed by {number + 1}. " * (1 + number % 5) for number in range(160)]
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    values = {
        "run": {"folder": str(folder / name), "seed": 7, "hang_after_seconds": hang_seconds},
        "model": {
            "from_config": {"model_type": "llama", "values": {**sizes, "num_key_value_heads": 2}},
            "tokenizer": {"train": {"vocabulary_size": 300}},
            **model,
        },
        "data": {
            "train": {"path": str(rows), "format": "text"},
            "max_length": 128,
            "cache_folder": str(folder / "cache"),
        },
        "task": {"name": "pretrain"},
        "train": {"global_batch_size": 12, "microbatch_size": 1, "steps": STEPS, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 10, "keep_last": 2},
        "export": {"verify": False},
        "report": {"console": "plain", "log_every_steps": 1},
    }
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(values))
    return path


def undisturbed_losses(folder: Path, **model: object) -> dict[int, float]:
    """Return the losses of the same job on one process, which is run the first time."""
    name = "-".join(["alone", *model])
    if not (folder / name).exists():
        command = [sys.executable, "-m", "finetune", "--config", str(write_job(folder, name, **model))]
        assert launching.run(command, log=folder / f"{name}.log", timeout_seconds=400) == 0
    return losses(folder / name)


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step; of a step that was taken again, the later one."""
    return {event["step"]: event["loss"] for event in _steps(folder)}


@dataclass
class RayRun:
    """A run on these hosts, each with a raylet; Ray's head and the command are on a host of their own."""

    folder: Path  # of the test: jobs, logs and caches
    name: str
    hosts: Sequence[Host]
    head: Host
    strategy: str
    ranks_per_host: int = 1
    stop_seconds: int = 20
    max_failures: int = 10
    model: Mapping[str, object] = field(default_factory=dict)
    hang_seconds: int = 60
    faults: str = ""
    events: list[str] = field(default_factory=list)  # what was done to it, for the table
    lost: list[tuple[int, float]] = field(default_factory=list)  # the event of each lost host, and when it was
    groups: list[list[str]] = field(default_factory=list)  # the hosts of each attempt whose ranks trained

    def __post_init__(self) -> None:
        self.job = write_job(self.folder, self.name, hang_seconds=self.hang_seconds, **self.model)
        self.run = self.folder / self.name
        self.expected = undisturbed_losses(self.folder, **self.model)
        self.chance = random.Random(self.name)
        self.temporary = Path(tempfile.mkdtemp(prefix="rh"))  # the path of a socket has 107 characters

    def start(self, *hosts: Host) -> None:
        """Start Ray's head, the raylets of these hosts, and the command."""
        self.begin_head()
        for host in hosts:
            self.join(host)
        self.launch()

    def begin_head(self) -> None:
        self._begin_raylet(self.head, "--head", "--port", str(_PORT), "--include-dashboard", "false", num_cpus=0)
        until(lambda: "Ray runtime started" in self.text(self.head), seconds=_TIMEOUT_SECONDS)

    def join(self, host: Host, **environment: str) -> None:
        words = ("--address", f"{self.head.address}:{_PORT}")
        self._begin_raylet(host, *words, num_cpus=self.ranks_per_host, **environment)

    def _begin_raylet(self, host: Host, *words: str, num_cpus: int, **environment: str) -> None:
        text = "; ".join(fault for fault in (_PACE, self.faults) if fault)
        host.begin(
            *("-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *words),
            *("--node-ip-address", host.address, "--num-cpus", str(num_cpus), "--num-gpus", "0"),
            *("--temp-dir", str(self.temporary / host.name), "--object-store-memory", "100000000"),
            log=self.log(host),
            **_raylet_settings(),
            **{heartbeat.VARIABLE: text, **environment},
        )

    def launch(self) -> None:
        """Start the command."""
        self.command = self.head.begin(
            *("-m", "finetune", "launch", "ray", "--config", str(self.job), "--cpu"),
            *("--accelerate", f"accelerate_configs/{self.strategy}.yaml", "--nodes", f"1:{len(self.hosts)}"),
            *("--gpus-per-node", str(self.ranks_per_host), "--stop", str(self.stop_seconds)),
            *("--address", f"{self.head.address}:{_PORT}", "--max-failures", str(self.max_failures)),
            log=self.folder / f"{self.name}.log",
            **_raylet_settings(),
        )
        threading.Thread(target=self._watch, args=(self.command,), daemon=True).start()

    def log(self, host: Host) -> Path:
        return self.folder / f"{self.name}-{host.name}.log"

    def text(self, host: Host | None = None) -> str:
        """Return what a raylet has printed, or the command, to which Ray sends the lines of all ranks."""
        path = self.log(host) if host is not None else self.folder / f"{self.name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def kill(self, host: Host, *, at_step: int | None = None) -> None:
        """Take the host away, at a random step unless one is given."""
        self.until_step(at_step if at_step is not None else self.chance.randrange(5, 30))
        self.lost.append((len(self.events), time.time()))
        self.events.append(f"{host.name} lost at step {self.step()}")
        host.kill()

    def restart(self, host: Host) -> None:
        self.events.append(f"{host.name} back at step {self.step()}")
        host.boot()
        self.join(host)

    def lose_and_take_back(self, host: Host) -> None:
        """Take the host away at a random step, and boot it once the others train; return when all of them do."""
        others = [each.name for each in self.hosts if each is not host]
        self.kill(host)
        self.until_hosts(*others)
        self.restart(host)
        self.until_hosts(host.name, *others)

    def step(self) -> int:
        return int(read_status(self.run).get("step", 0))

    def num_attempts(self) -> int:
        return len(list((self.run / "ray").glob("begun-*")))

    def training_hosts(self) -> list[str]:
        """Return the hosts whose ranks train now."""
        status = read_status(self.run)
        return sorted({peer["host"] for peer in status["ranks"]}) if status.get("state") == "running" else []

    def _watch(self, command: "subprocess.Popen[bytes]") -> None:
        """Add the hosts of each attempt once its ranks train; rank 0 is another process in each."""
        seen: set[tuple[str, int]] = set()
        while command.poll() is None:
            status = read_status(self.run)
            if status.get("state") == "running" and (rank_0 := (status["host"], status["pid"])) not in seen:
                seen.add(rank_0)
                self.groups.append(sorted({peer["host"] for peer in status["ranks"]}))
            time.sleep(0.2)

    def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so, or fail: at once if the command has ended."""

        def has_ended_or_is_so() -> bool:
            assert self.command.poll() is None, self.text()[-3000:]
            for host in self.hosts:  # a raylet that has ended starts again, as an init system would have it
                if host.programs and all(program.poll() is not None for program in host.programs):
                    host.programs.clear()
                    self.join(host)
            return is_so()

        until(has_ended_or_is_so, seconds=_TIMEOUT_SECONDS)

    def until_hosts(self, *names: str) -> None:
        """Wait until ranks on these hosts train."""
        self.until(lambda: self.training_hosts() == sorted(names))

    def until_step(self, step: int) -> None:
        self.until(lambda: bool(self.training_hosts()) and self.step() >= step)

    def until_logged(self, words: str) -> None:
        self.until(lambda: words in self.text())

    def ranks_on(self, host: Host) -> list[psutil.Process]:
        """Return the processes of a host that train, by rank."""
        found = [psutil.Process(pid) for pid in host.pids()]
        ranks = [process for process in found if process.cmdline()[1:5] == ["-m", "finetune", "train", "--config"]]
        return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))

    def finish(self) -> "Outcome":
        """Wait for the end; fail unless each step was taken with its loss, and no rank is left running."""
        until(lambda: self.command.poll() is not None, seconds=_TIMEOUT_SECONDS)
        assert self.command.returncode == 0, self.text()[-3000:]
        until(lambda: not any(self.ranks_on(host) for host in self.hosts), seconds=30)
        for host in (*self.hosts, self.head):
            host.kill()
        shutil.rmtree(self.temporary, ignore_errors=True)
        found = losses(self.run)
        assert sorted(found) == sorted(self.expected) == list(range(1, STEPS + 1))
        outcome = self._outcome(found)
        if path := os.environ.get(RESULTS):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        assert outcome.largest_difference < 1e-4
        return outcome

    def _outcome(self, found: Mapping[int, float]) -> "Outcome":
        taken = _steps(self.run)
        for number, lost_at in self.lost:
            resumed_at = min(event["time"] for event in _events(self.run, "RunStarted") if event["time"] > lost_at)
            seconds = min(event["time"] for event in taken if event["time"] > resumed_at) - lost_at
            self.events[number] += f" (next step after {seconds:.0f} s)"
        lost, newest, at = 0.0, 0, 0.0
        for event in taken:
            if event["step"] > newest:
                lost += max(0.0, event["time"] - at - 1.0) if newest else 0.0
                newest, at = event["step"], event["time"]
        return Outcome(
            name=self.name,
            strategy=self.strategy.removeprefix("multi_node_"),
            hosts=f"{len(self.hosts)} x {self.ranks_per_host}",
            steps=STEPS,
            happened=", ".join(self.events),
            attempts=[",".join(hosts) for hosts in self.groups],
            steps_again=len(taken) - len(found),
            seconds_lost=round(lost, 1),
            largest_difference=max(abs(found[step] - self.expected[step]) for step in found),
            median_step_seconds=round(statistics.median(event["seconds"] for event in taken), 4),
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    name: str
    strategy: str
    hosts: str
    steps: int
    happened: str
    attempts: list[str]
    steps_again: int  # taken once more after a restart
    seconds_lost: float  # between two new steps, beyond a second each
    largest_difference: float  # of any step's loss from that on one process
    median_step_seconds: float


def _raylet_settings() -> dict[str, str]:
    settings = {f"RAY_{name}": str(value) for name, value in HEAD_SETTINGS.items()}
    own = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_agent_register_timeout_ms": "60000",  # a raylet ends when its agents take longer to start
        "RAY_worker_niceness": "0",  # 15 by default: on a machine with other work, ranks would hardly run
    }
    return {**settings, **own}


def _steps(folder: Path) -> list[dict]:
    return _events(folder, "StepTaken")


def _events(folder: Path, name: str) -> list[dict]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == name]
