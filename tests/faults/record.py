"""The record of many faults: what is remembered while they run, and the page that lists them with their outcomes."""

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from tests.faults.schedule import Chain


@dataclass(frozen=True)
class Line:
    """What is remembered of a chain."""

    number: int
    job: str
    places: str
    struck: tuple[str, ...]
    notes: tuple[str, ...]
    violations: tuple[str, ...]
    skipped: str
    num_attempts: int
    seconds: float


def describe_job(chain: Chain) -> str:
    """Return in a few words what the chain trains, and how it is saved."""
    words = ["LoRA" if chain.adapter else "full", "async" if chain.asynchronous else "sync"]
    words += ["loader process"] * chain.workers + ["own disk"] * chain.has_own_disk
    return ", ".join(words)


def describe_places(chain: Chain) -> str:
    """Return where it runs; an arrow where the place changes."""
    places = [("cold " if attempt.is_cold else "") + str(attempt.place) for attempt in chain.attempts]
    return " -> ".join(place for number, place in enumerate(places) if number == 0 or place != places[number - 1])


class Record:
    """Chains that have run, in a file: a run of the same seed and source goes on after the last of them.

    `keep`: also where the source has changed since; chains with violations then run again.
    """

    def __init__(self, path: Path, *, seed: int, source: str, keep: bool = False) -> None:
        self._path = path
        head = {"seed": seed, "source": source}
        self.lines = self._read(head, keep=keep)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(each) + "\n" for each in (head, *map(asdict, self.lines))))

    def add(self, line: Line) -> None:
        """Remember a chain."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")

    @property
    def num_struck(self) -> int:
        """Return how many faults have struck."""
        return sum(len(line.struck) for line in self.lines)

    def _read(self, head: dict[str, object], *, keep: bool) -> list[Line]:
        if not self._path.exists():
            return []
        before, *rest = [json.loads(line) for line in self._path.read_text().splitlines()]
        lines = [_line(values) for values in rest]
        if before == head:
            return lines
        return [line for line in lines if not line.violations] if keep and before["seed"] == head["seed"] else []


def _line(values: dict[str, object]) -> Line:
    return Line(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})  # type: ignore[arg-type]


def page(lines: Sequence[Line], *, seed: int) -> str:
    """Return the list as Markdown."""
    struck = [fault for line in lines for fault in line.struck]
    wrong = [line for line in lines if line.violations]
    seconds = sum(line.seconds for line in lines)
    num_launches = sum(line.num_attempts for line in lines)
    text = [
        f"# {len(struck)} faults\n",
        f"`python -m tests.faults --count {len(struck)} --seed {seed}`: {len(struck)} faults struck {len(lines)} runs "
        f"in {num_launches} launches; {len(wrong)} runs violated what must hold. {seconds / 60:.0f} minutes, "
        f"{seconds / max(1, len(struck)):.1f} s per fault, on {os.cpu_count()} cores (torch {version('torch')}, "
        f"{platform.machine()}). What must hold is in [judge.py](../../tests/faults/judge.py); hosts are network "
        "namespaces, and all talk is gloo's.\n",
        "| fault | struck |\n|---|---|",
        *(f"| {kind} | {count} |" for kind, count in Counter(map(_kind, struck)).most_common()),
        "\n| run | job | places | faults | outcome |\n|---|---|---|---|---|",
        *(_row(line) for line in sorted(lines, key=lambda line: line.number)),
    ]
    return "\n".join(text) + "\n"


def _kind(fault: str) -> str:
    two = " ".join(fault.split()[:2])
    kinds = ("no space", "bit rot", "full disk", "file limit", "lose host", "lose link", "drop packets")
    return two if two in kinds else two.split()[0]


def _row(line: Line) -> str:
    outcome = "; ".join(line.violations) or line.skipped or line.notes[-1]
    cells = (str(line.number), line.job, line.places, "; ".join(line.struck), outcome)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
