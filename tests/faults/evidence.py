"""What a run has left, read without asking the product: its checkpoints, its events, its processes."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS, STATUS, CHECKPOINTS = "events.jsonl", "status.json", "checkpoints"


@dataclass(frozen=True)
class Attempted:
    """What became of one attempt."""

    code: int  # of the launcher; LATE: it did not end
    output: str
    seconds: float
    step_before: int  # of the newest whole checkpoint when it began; 0: there was none
    started_at: int | None  # the step from which it says that it trains; None: it did not come so far
    status: Mapping[str, Any]  # as it was in the end; empty: it wrote none
    struck: tuple[str, ...]  # the faults that befell it
    orphans: tuple[str, ...]  # what still ran long after the launcher had ended
    torn: tuple[str, ...]  # checkpoints that are not whole though nobody damaged them
    trusted: tuple[str, ...] = ()  # damaged checkpoints that a start should have set aside by name, and has not


LATE = 124
"""The exit code of an attempt that had to be ended."""


@dataclass
class Run:
    """A run's folder."""

    folder: Path
    damaged: set[str] = field(default_factory=set)  # checkpoints that the harness has damaged, by name

    def events(self) -> list[dict[str, Any]]:
        """Return the events that were written, in order; torn lines are left out."""
        return list(_json_lines(self.folder / EVENTS))

    def status(self) -> dict[str, Any]:
        """Return the status; empty where there is none that can be read."""
        try:
            found = json.loads((self.folder / STATUS).read_text())
        except (OSError, ValueError):
            return {}
        return dict(found) if isinstance(found, dict) else {}

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints by their names, the oldest first."""
        found = (self.folder / CHECKPOINTS).glob("step-*")
        return sorted(path for path in found if re.fullmatch(r"step-\d{6}", path.name))

    def newest_whole(self) -> Path | None:
        """Return the newest checkpoint whose every file has the digest that its manifest names."""
        return next((path for path in reversed(self.checkpoints()) if is_whole(path)), None)

    def broken(self) -> list[str]:
        """Return the names of checkpoints that are not whole, whoever has damaged them."""
        return [path.name for path in self.checkpoints() if not is_whole(path)]

    def torn(self) -> list[str]:
        """Return those that the harness has not damaged; what was written again is no longer damaged."""
        broken = self.broken()
        self.damaged &= set(broken)
        return [name for name in broken if name not in self.damaged]

    def leftovers(self) -> list[str]:
        """Return what a finished run has no use for: staging folders and temporary files."""
        found = [path for path in self.folder.rglob("*") if re.match(r"\.(staging-|deleted|.*finetune-tmp)", path.name)]
        return sorted(str(path.relative_to(self.folder)) for path in found)


def is_whole(checkpoint: Path) -> bool:
    """Tell whether every file of a checkpoint is as its manifest says, and the manifest as it says of itself."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        sizes = {name: facts["sha256"] for name, facts in manifest["files"].items()}
        found = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in sizes}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return found == sizes and len(found) >= 5 and _own_digest(manifest)


def _own_digest(manifest: dict[str, Any]) -> bool:
    """Tell whether the manifest has the digest that it names: SHA-256 of its JSON without that key."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return manifest.get("sha256") == hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Step:
    """What is said of one step."""

    loss: float
    norm: float
    rate: float
    samples: str


@dataclass(frozen=True)
class History:
    """The steps that led to the run's end: what a resumed run took again counts once, as it was taken last."""

    steps: Mapping[int, Step]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, events: list[dict[str, Any]]) -> "History":
        """Return the history of all attempts; a step that does not follow its predecessor is a problem."""
        steps: dict[int, Step] = {}
        problems = []
        for event in events:
            if event["event"] == "RunStarted":
                steps = {step: fact for step, fact in steps.items() if step <= event["step"]}
            if event["event"] == "StepTaken":
                if event["step"] != len(steps) + 1:
                    problems.append(f"step {event['step']} was taken after step {len(steps)}")
                steps[event["step"]] = _step(event)
        return cls(steps, tuple(problems))


def _step(event: Mapping[str, Any]) -> Step:
    return Step(event["loss"], event["gradient_norm"], event["learning_rate"], event["samples_sha256"])


def all_steps(events: list[dict[str, Any]]) -> Iterator[tuple[int, Step]]:
    """Yield every step that was ever taken, those that were taken again, too."""
    yield from ((event["step"], _step(event)) for event in events if event["event"] == "StepTaken")


def state_digest(checkpoint: Path) -> str:
    """Return the digest of parameters, optimizer state, step and samples that a checkpoint names."""
    return str(json.loads((checkpoint / "manifest.json").read_text())["state_sha256"])


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "event" in value:
            yield value
