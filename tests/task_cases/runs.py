"""Launches cases under strategies and reads what they leave behind."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.report.history import read_events
from tests.launching import accelerate_command, run
from tests.task_cases.case import Case

TIMEOUT_SECONDS = 900  # the first DeepSpeed run on a machine compiles for minutes


@dataclass(frozen=True)
class Left:
    """What a run has left behind."""

    folder: Path

    @property
    def error(self) -> str | None:
        path = self.folder / "error.txt"
        return path.read_text() if path.exists() else None

    @property
    def losses(self) -> list[float]:
        return [float(event["loss"]) for event in self._events("StepTaken")]

    @property
    def steps(self) -> list[tuple[float, float, str]]:
        """Loss, gradient norm and digest of the samples of each step."""
        return [(each["loss"], each["gradient_norm"], each["samples_sha256"]) for each in self._events("StepTaken")]

    @property
    def metrics(self) -> Mapping[str, float]:
        return self._events("Evaluated")[-1]["metrics"]

    @property
    def final(self) -> Path:
        return self.folder / "final"

    @property
    def checkpoint_digests(self) -> dict[str, object]:
        """Those of weights, optimizer state and random states in the last checkpoint."""
        last = max((self.folder / "checkpoints").glob("step-*")) / "manifest.json"
        files = json.loads(last.read_text())["files"]
        return {name: facts for name, facts in files.items() if name.split("/")[0] in ("model", "optimizer", "rng")}

    def _events(self, name: str) -> list[dict]:
        return [event for event in read_events(self.folder / "events.jsonl") if event["event"] == name]


def prepare(cases: Iterable[Case], folder: Path) -> None:
    """Write each case's job and rows into a folder of its name."""
    for case in cases:
        place = folder / case.name
        place.mkdir(parents=True, exist_ok=True)
        (place / "job.yaml").write_text(case.job)
        case.prepare(place)


def launch(
    strategy: str | None, runs: Sequence[tuple[Case, str]], folder: Path, *, name: str = "", processes: int = 2
) -> dict[tuple[str, str], Left]:
    """Run the cases' variants in one launch (None: one process, no launcher); return what each has left behind."""
    name = name or strategy or "single"
    left = {(case.name, variant): Left(folder / case.name / "runs" / f"{name}-{variant}") for case, variant in runs}
    spec = [
        {
            "job": str(folder / case.name / "job.yaml"),
            "overrides": [
                f"run.folder={left[case.name, variant].folder}",
                f"data.cache_folder={folder / case.name / 'cache'}",
                *case.variants[variant],
            ],
        }
        for case, variant in runs
    ]
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    path.write_text(json.dumps(spec))
    words = ["-m", "tests.task_cases.worker", str(path)]
    alone = [sys.executable, *words]
    command = alone if strategy is None else accelerate_command(strategy, *words, processes=processes)
    code = run(command, log=log, timeout_seconds=TIMEOUT_SECONDS)
    if code != 0:
        raise RuntimeError(f"{name} ended with {code}:\n{log.read_text(errors='replace')[-6000:]}")
    return left
