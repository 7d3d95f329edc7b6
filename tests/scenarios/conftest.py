"""A tiny job on generated rows, and a way to launch it for real under any strategy."""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from finetune.export.verify import verifier
from finetune.report.history import read_events
from finetune.runtime.supervision.faults import VARIABLE
from tests import launching
from tests.scenarios.running import Running
from tests.scenarios.trained import forget, run_folder, stay
from tests.verifier_server import use_server

use_server(verifier)

TIMEOUT_SECONDS = 540  # the first DeepSpeed run on a machine compiles for minutes
WORDS = ["red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown"]

JOB = """
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
       tie_word_embeddings: true}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  train: {path: train.jsonl}
  validation: {path: held_out.jsonl}
  max_length: 128
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train:
  global_batch_size: 8
  microbatch_size: 4
  steps: 8
  learning_rate: 1e-2
  schedule: {name: cosine, warmup_steps: 2}
checkpoint: {every_steps: 4}
evaluate: {every_steps: 4}
report: {console: plain, log_every_steps: 1}
export: {verify: false}
"""


@dataclass(frozen=True)
class Ended:
    """A launch that is over."""

    code: int
    output: str
    folder: Path

    def events(self, name: str) -> list[dict]:
        return [event for event in read_events(self.folder / "events.jsonl") if event["event"] == name]

    def losses(self) -> list[float]:
        return [float(event["loss"]) for event in self.events("StepTaken")]

    def norms(self) -> list[float]:
        return [float(event["gradient_norm"]) for event in self.events("StepTaken")]

    def last_metrics(self) -> dict[str, float]:
        return self.events("Evaluated")[-1]["metrics"]

    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())

    def environment(self) -> dict:
        return json.loads((self.folder / "environment.json").read_text())

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("step-*"))


Launch = Callable[..., Ended]
Begin = Callable[..., Running]


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file beside its rows: answers of one to eight words, so that every batch has another number of targets."""
    folder = tmp_path_factory.mktemp("job")
    chance = random.Random(1)
    for name, count in (("train.jsonl", 50), ("held_out.jsonl", 7)):
        rows = [_row(chance) for _ in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def _row(chance: random.Random) -> dict:
    words = chance.choices(WORDS, k=chance.randint(1, 8))
    return {
        "messages": [
            {"role": "user", "content": f"reverse: {' '.join(words)}"},
            {"role": "assistant", "content": " ".join(reversed(words))},
        ]
    }


@pytest.fixture(scope="session")
def launch(job: Path) -> Launch:
    """Start the job under a strategy (None: one process without a launcher) and wait for its end.

    Where it `is_cold`, launcher and ranks are fresh interpreters; else they are forked, see tests/launching.py.
    """

    def start(
        strategy: str | None,
        *,
        name: str,
        processes: int = 2,
        overrides: Sequence[str] = (),
        faults: str = "",
        environment: Mapping[str, str] | None = None,
        is_cold: bool = False,
    ) -> Ended:
        folder, log = job.parent / "runs" / name, job.parent / "logs" / f"{name}.log"
        command = command_of(job, strategy, folder=folder, processes=processes, overrides=overrides)
        variables = {VARIABLE: faults, **(environment or {})}
        code = launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment=variables, is_cold=is_cold)
        return Ended(code, log.read_text(errors="replace"), folder)

    return start


@pytest.fixture
def trained(job: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Return the folders of tiny finished runs: `full`, `lora`, `merged`. The test may itself build an Accelerator."""
    monkeypatch.setattr("finetune.runtime.distributed.shut_down", stay)
    yield lambda name: run_folder(job, name)
    forget()


@pytest.fixture
def begin(job: Path) -> Iterator[Begin]:
    """Start the job under a strategy and return at once; what still runs at the end of the test is killed."""
    begun: list[Running] = []

    def start(
        strategy: str | None, *, name: str, processes: int = 2, overrides: Sequence[str] = (), faults: str = ""
    ) -> Running:
        folder, log = job.parent / "runs" / name, job.parent / "logs" / f"{name}.log"
        command = command_of(job, strategy, folder=folder, processes=processes, overrides=overrides)
        begun.append(Running(command, folder=folder, log=log, environment={VARIABLE: faults}))
        return begun[-1]

    yield start
    for running in begun:
        running.kill_all()


def command_of(job: Path, strategy: str | None, *, folder: Path, processes: int, overrides: Sequence[str]) -> list[str]:
    words = ["-m", "finetune", "--config", str(job)]
    for override in [f"run.folder={folder}", *overrides]:
        words += ["--set", override]
    if strategy is None:
        return [sys.executable, *words]
    return launching.accelerate_command(strategy, *words, processes=processes)
