"""A supervised run on the hosts of a cluster: its job, what disturbs it, and the comparison with an undisturbed one."""

import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from finetune.report.history import read_events
from finetune.runtime.supervision import faults
from tests import launching
from tests.launch.cluster import Host, orphans, read_status, until

STEPS, LOST_AFTER = 90, 4
RESULTS = "FINETUNE_HOSTS_RESULTS"
"""The variable that names a file to which each run adds a line, for `benchmarks/hosts.py`."""

_PACE = "; ".join(f"data step={step} do=sleep seconds=0.15" for step in range(1, STEPS + 1))
"""A host that returns finds the run still going."""

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
class SupervisedRun:
    """A run on these hosts."""

    folder: Path  # of the test: jobs, logs and caches
    name: str
    hosts: Sequence[Host]
    strategy: str
    ranks_per_host: int = 2
    least: int = 1
    stop_seconds: int = 20
    join_seconds: int = 60
    model: Mapping[str, object] = field(default_factory=dict)
    hang_seconds: int = 60
    faults: str = ""
    said: list[str] = field(default_factory=list)  # what was done to it, for the table

    def __post_init__(self) -> None:
        self.job = write_job(self.folder, self.name, hang_seconds=self.hang_seconds, **self.model)
        self.run = self.folder / self.name
        self.expected = undisturbed_losses(self.folder, **self.model)
        self.chance = random.Random(self.name)

    def start(self, *hosts: Host) -> None:
        """Start the supervisors of these hosts."""
        number = f"{self.least}:{len(self.hosts)}"
        for host in hosts:
            words = [
                *("-m", "finetune", "launch", "torchrun", "--supervise", "--config", str(self.job)),
                *("--accelerate", f"accelerate_configs/{self.strategy}.yaml", "--nodes", number),
                *("--gpus-per-node", str(self.ranks_per_host), "--name", host.name, "--interface", "eth0"),
                *("--lost-after", str(LOST_AFTER), "--join", str(self.join_seconds), "--stop", str(self.stop_seconds)),
            ]
            text = "; ".join(each for each in (_PACE, self.faults) if each)
            host.begin(*words, log=self.log(host), **{faults.VARIABLE: text})

    def log(self, host: Host) -> Path:
        return self.folder / f"{self.name}-{host.name}.log"

    def text(self, host: Host) -> str:
        return self.log(host).read_text(errors="replace")

    def kill(self, host: Host, *, at_step: int | None = None) -> None:
        """Take the host away, at a random step unless one is given."""
        step = at_step if at_step is not None else self.chance.randrange(5, 40)
        self.until_step(step)
        self.said.append(f"{host.name} lost at step {read_status(self.run).get('step', 0)}")
        host.kill()

    def restart(self, host: Host) -> None:
        self.said.append(f"{host.name} back at step {read_status(self.run).get('step', 0)}")
        host.boot()
        self.start(host)

    def lose_and_take_back(self, host: Host) -> None:
        """Take the host away at a random step, and boot it once the others train; return when all of them do."""
        others = [each.name for each in self.hosts if each is not host]
        self.kill(host)
        self.until_hosts(*others)
        self.restart(host)
        self.until_hosts(host.name, *others)

    def attempts(self) -> list[dict]:
        """Return all attempts, in order; those that are being written are left out."""
        found = []
        for path in sorted((self.run / "supervisors").glob("attempt-*.json")):
            with suppress(ValueError, OSError):
                found.append(json.loads(path.read_text()))
        return found

    def attempt(self) -> dict:
        return (self.attempts() or [{"hosts": [], "exit_code": None, "number": 0}])[-1]

    def until_hosts(self, *names: str) -> None:
        """Wait until an attempt runs on these hosts, and its ranks train."""
        wanted = sorted(names)
        until(lambda: sorted(self.attempt()["hosts"]) == wanted)
        number, ranks = self.attempt()["number"], len(names) * self.ranks_per_host
        until(lambda: (self.run / "supervisors" / f"begun-{number:06d}").exists())
        until(lambda: self._is_training(ranks) or self.attempt()["number"] > number)

    def _is_training(self, ranks: int) -> bool:
        status = read_status(self.run)
        return status.get("state") == "running" and len(status["ranks"]) == ranks

    def until_step(self, step: int) -> None:
        until(lambda: read_status(self.run).get("state") == "running" and read_status(self.run)["step"] >= step)

    def until_said(self, host: Host, words: str) -> None:
        until(lambda: words in self.text(host))

    def finish(self, *codes: int) -> "Outcome":
        """Wait for the end; fail unless each step was taken with its loss, and nothing is left running."""
        programs = [program for host in self.hosts for program in host.programs]
        until(lambda: all(program.poll() is not None for program in programs))
        found, logs = losses(self.run), [self.text(host)[-2000:] for host in self.hosts if self.log(host).exists()]
        assert sorted(program.returncode for program in programs) == sorted(codes or [0] * len(programs)), logs
        assert self.attempt()["exit_code"] == 0 and not orphans(self.hosts)
        assert sorted(found) == sorted(self.expected) == list(range(1, STEPS + 1))
        outcome = self._outcome(found)
        if path := os.environ.get(RESULTS):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        assert outcome.largest_difference < 1e-4
        return outcome

    def _outcome(self, found: Mapping[int, float]) -> "Outcome":
        taken = _steps(self.run)
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
            happened=", ".join(self.said),
            attempts=[",".join(each["hosts"]) for each in self.attempts() if each["exit_code"] is None],
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


def _steps(folder: Path) -> list[dict]:
    return [event for event in read_events(folder / "events.jsonl") if event["event"] == "StepTaken"]
