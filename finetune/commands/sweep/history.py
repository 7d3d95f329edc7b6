"""The events of a run, read as they are written: losses, evaluations, time and tokens, each step counted once."""

from bisect import bisect_right
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.report.history import parse_events
from finetune.runtime.files.read import open_regular

TRAIN_LOSS = "train_loss"
"""Without evaluations: the mean loss per target of the last steps."""

_RECENT_STEPS = 20


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation, those that are numbers."""

    step: int
    metrics: Mapping[str, float]


class RunHistory:
    """Follows an `events.jsonl`; of steps that were taken again after a kill, the last time counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""  # of a line that is still being written
        self.evaluations: list[Evaluation] = []
        self.steps: list[int] = []
        self.seconds = 0.0  # that the steps took, without evaluations and saves
        self._facts: list[tuple[float, float, float, float]] = []  # loss, targets, tokens, seconds of each step

    def read_new(self) -> None:
        """Read what was written since the last call; nothing where the file cannot be read."""
        try:
            with open_regular(self._path) as file:
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return
        self._offset += len(content)
        whole, _, self._rest = (self._rest + content).rpartition(b"\n")
        for event in parse_events(whole).events:
            with suppress(KeyError):  # a field is missing
                self._add(event)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """Return the metric at every step where it was measured."""
        if name == TRAIN_LOSS:
            return [(self.steps[-1], self._train_loss())] if self.steps else []
        return [
            (evaluation.step, evaluation.metrics[name]) for evaluation in self.evaluations if name in evaluation.metrics
        ]

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens of all steps by their time; None before the first."""
        return sum(facts[2] for facts in self._facts) / self.seconds if self.seconds > 0 else None

    @property
    def last_loss(self) -> float:
        """Return the training loss of the last step; NaN before the first."""
        return self._facts[-1][0] if self._facts else float("nan")

    def _train_loss(self) -> float:
        recent = self._facts[-_RECENT_STEPS:]
        targets = sum(facts[1] for facts in recent)
        return sum(facts[0] * facts[1] for facts in recent) / targets if targets else float("nan")

    def _add(self, event: Any) -> None:
        match event["event"]:
            case "RunStarted":
                self._forget_after(int(event["step"]))
            case "StepTaken":
                facts = (event["loss"], event["num_targets"], event["num_tokens"], event["seconds"])
                numbers = tuple(map(float, facts))
                self.steps.append(int(event["step"]))
                self._facts.append((numbers[0], numbers[1], numbers[2], numbers[3]))
                self.seconds += numbers[3]
            case "Evaluated":
                metrics = {name: float(value) for name, value in event["metrics"].items()}
                self.evaluations.append(Evaluation(int(event["step"]), metrics))

    def _forget_after(self, step: int) -> None:
        kept = bisect_right(self.steps, step)
        del self.steps[kept:], self._facts[kept:]
        self.seconds = sum(facts[3] for facts in self._facts)
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation.step <= step]
