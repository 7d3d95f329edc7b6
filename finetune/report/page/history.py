"""What events.jsonl says of a run, in bounded memory however long it is."""

import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from finetune.report.console import throughput_unit
from finetune.report.page.curves import Curve
from finetune.report.page.restarts import RestartHistory

EventFields = Mapping[str, Any]

MAX_MESSAGES, MAX_ROWS, MAX_PROMPTS, MAX_ANSWERS, MAX_CHARACTERS = 300, 100, 50, 40, 4000
_RECENT_STEPS = 50
_PLAIN_COLUMNS = ("loss", "gradient_norm", "learning_rate", "data_share", "memory_bytes", "epoch")
_WORLD = re.compile(r"\b(\d+) process(?:es)?\b")


@dataclass
class Message:
    """A warning or a note; the same text is kept once."""

    text: str
    is_warning: bool
    step: int
    count: int = 1


@dataclass
class Answers:
    """The answers to one prompt by step."""

    prompt: str
    reference: str
    by_step: dict[int, str] = field(default_factory=dict)


class RunHistory:
    """Curves and lists of a run; a step that is taken again counts as taken the last time.

    `seconds` is the time in steps, evaluations and waiting for saves, with steps that were lost in a crash, without
    start-up and the time between two starts. `device_seconds` is the same times the number of processes.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.starts: list[EventFields] = []
        self.ended: EventFields | None = None  # RunEnded of the last start
        self.startup: EventFields | None = None
        self.last_step: EventFields = {}
        self.updated = 0.0  # unix seconds of the last event
        self.num_processes = 1
        self.recent: deque[EventFields] = deque(maxlen=_RECENT_STEPS)
        self.messages: dict[str, Message] = {}
        self.skipped: deque[EventFields] = deque(maxlen=MAX_ROWS)
        self.num_skipped = 0
        self.checkpoints: deque[EventFields] = deque(maxlen=MAX_ROWS)
        self.profiles: deque[EventFields] = deque(maxlen=MAX_ROWS)
        self.answers: dict[tuple[str, str], Answers] = {}
        self.num_prompts_left_out = 0
        self.tokens = self.seconds = self.device_seconds = 0.0
        self.startup_seconds = 0.0
        self.restarts = RestartHistory()
        self.num_damaged_lines = 0

    def add(self, events: Sequence[EventFields], *, num_damaged: int = 0) -> None:
        """Add events in the order in which they were written, and the number of damaged lines among them."""
        self.num_damaged_lines += num_damaged
        for name, group in groupby(events, key=lambda event: event["event"]):
            batch = list(group)
            self.updated = max(self.updated, _number(batch[-1].get("time", 0)))
            if name == "StepTaken":
                self._add_steps(batch)
            elif act := self._handlers().get(name):
                for event in batch:
                    try:
                        act(event)
                    except KeyError:  # a field is missing
                        self.num_damaged_lines += 1

    @property
    def step(self) -> int:
        """Return the last step taken; 0 before the first."""
        return int(self.last_step.get("step", 0))

    @property
    def num_steps(self) -> int | None:
        """Return the planned steps; None before the first start."""
        return self.starts[-1].get("num_steps") if self.starts else None

    @property
    def unit(self) -> str:
        """Return what a step is counted in: tokens, or images."""
        return throughput_unit(self.starts[-1].get("config") or {} if self.starts else {})

    @property
    def damaged(self) -> tuple[str, ...]:
        """Return how many lines were skipped, in words; nothing where none was."""
        return (f"{self.num_damaged_lines:,} lines of events.jsonl (skipped)",) if self.num_damaged_lines else ()

    @property
    def num_warnings(self) -> int:
        """Return how many different warnings there were."""
        return sum(message.is_warning for message in self.messages.values())

    def _handlers(self) -> Mapping[str, Callable[[EventFields], None]]:
        return {
            "RunStarted": self._start,
            "StartedUp": self._add_startup,
            "StepSkipped": self._add_skipped,
            "Evaluated": self._add_evaluation,
            "Answered": self._add_answer,
            "CheckpointSaved": self._add_checkpoint,
            "Profiled": self.profiles.append,
            "Noted": self._add_message,
            "Warned": self._add_message,
            "RunEnded": self._end,
        }

    def _start(self, event: EventFields) -> None:
        if len(self.starts) >= MAX_ROWS:
            del self.starts[1]
        self.starts.append(event)
        self.ended = None
        if found := _WORLD.search(" ".join([*map(str, event.get("arithmetic", ())), str(event.get("strategy", ""))])):
            self.num_processes = int(found[1])
        self.restarts.start(event, num_devices=self.num_processes)
        if self.step > event["step"]:
            self._go_back(event["step"])

    def _end(self, event: EventFields) -> None:
        self.ended = event
        self.restarts.end(event)

    def _go_back(self, step: int) -> None:
        """Forget what came after the step."""
        for curve in self.curves.values():
            curve.cut_after(step)
        counted = self.curves["tokens"].points() if "tokens" in self.curves else None
        self.tokens = float(np.interp(step, counted.steps, counted.values)) if counted and len(counted.steps) else 0.0
        self.last_step = {**self.last_step, "step": step}
        self.recent.clear()
        for rows in (self.skipped, self.checkpoints, self.profiles):
            later = [row for row in rows if row["step"] > step]
            self.num_skipped -= len(later) if rows is self.skipped else 0
            for row in later:
                rows.remove(row)
        for answers in self.answers.values():
            answers.by_step = {at: text for at, text in answers.by_step.items() if at <= step}

    def _add_steps(self, batch: Sequence[EventFields]) -> None:
        self.restarts.steps_taken(batch)
        while batch:
            if batch[0]["step"] <= self.step and self.last_step:
                self._go_back(batch[0]["step"] - 1)
            count = next((i for i in range(1, len(batch)) if batch[i]["step"] <= batch[i - 1]["step"]), len(batch))
            self._add_rising(batch[:count])
            batch = batch[count:]

    def _add_rising(self, batch: Sequence[EventFields]) -> None:
        steps = [event["step"] for event in batch]
        for name in _PLAIN_COLUMNS:
            self._extend(name, steps, [event.get(name) for event in batch])
        seconds, tokens = _numbers(batch, "seconds"), _numbers(batch, "num_tokens")
        rates = np.divide(tokens, seconds, out=np.full(len(batch), np.nan), where=seconds > 0)
        self._extend("tokens_per_second", steps, rates.tolist())
        self._extend("seconds_per_step", steps, seconds.tolist())
        if (factor := self._mfu_factor()) is not None:
            self._extend("mfu", steps, (rates * factor).tolist())
        for group in ("metrics", "device"):
            for name in {name for event in batch for name in event.get(group) or ()}:
                self._extend(f"{group}/{name}", steps, [(event.get(group) or {}).get(name) for event in batch])
        self._count("tokens", steps, tokens)
        self._count("seconds", steps, seconds)
        self._count("device_seconds", steps, seconds * self.num_processes)
        self.last_step = batch[-1]
        self.recent.extend(batch)

    def _count(self, name: str, steps: Sequence[float], amounts: np.ndarray) -> None:
        sums = getattr(self, name) + np.cumsum(np.nan_to_num(amounts))
        self._extend(name, steps, sums.tolist())
        setattr(self, name, float(sums[-1]))

    def _extend(self, name: str, steps: Sequence[float], values: Sequence[Any]) -> None:
        pairs = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
        if pairs:
            found = [_number(value) for _, value in pairs]
            self.curves.setdefault(name, Curve()).extend([step for step, _ in pairs], found)

    def _mfu_factor(self) -> float | None:
        """Return by what tokens per second become the share of the devices' peak; None where it is not known."""
        start = self.starts[-1] if self.starts else {}
        per_token, peak = start.get("flops_per_token"), start.get("peak_flops_per_second")
        return per_token / peak if per_token and peak else None

    def _add_startup(self, event: EventFields) -> None:
        self.startup = event
        self.restarts.started_up(event)
        self.startup_seconds += sum(map(_number, event["seconds"].values()))

    def _add_skipped(self, event: EventFields) -> None:
        self.skipped.append(event)
        self.num_skipped += 1

    def _add_evaluation(self, event: EventFields) -> None:
        self._spend(event["seconds"])
        for name, value in event["metrics"].items():
            self._set(f"evaluation/{name}", event["step"], value)

    def _add_checkpoint(self, event: EventFields) -> None:
        self._spend(event["stall_seconds"])
        self.checkpoints.append(event)
        self._set("stall_seconds", event["step"], event["stall_seconds"])
        self._set("save_seconds", event["step"], event["seconds"])

    def _set(self, name: str, step: int, value: Any) -> None:
        """Add a point; one at the same step, of an earlier start, makes room."""
        curve = self.curves.setdefault(name, Curve())
        curve.cut_after(step - 1)
        self._extend(name, [step], [value])

    def _spend(self, seconds: Any) -> None:
        self.seconds += _number(seconds)
        self.device_seconds += _number(seconds) * self.num_processes

    def _add_answer(self, event: EventFields) -> None:
        prompt, reference, answer = (str(event[name])[:MAX_CHARACTERS] for name in ("prompt", "reference", "answer"))
        if (prompt, reference) not in self.answers and len(self.answers) >= MAX_PROMPTS:
            self.num_prompts_left_out += 1
            return
        answers = self.answers.setdefault((prompt, reference), Answers(prompt, reference))
        answers.by_step[event["step"]] = answer
        if len(answers.by_step) > MAX_ANSWERS:  # the first and the newest stay
            steps = list(answers.by_step)
            answers.by_step = {step: answers.by_step[step] for step in (*steps[:-1:2], steps[-1])}

    def _add_message(self, event: EventFields) -> None:
        text = str(event["message"])[:MAX_CHARACTERS]
        if text in self.messages:
            self.messages[text].count += 1
            return
        if len(self.messages) >= MAX_MESSAGES:
            del self.messages[next(iter(self.messages))]
        self.messages[text] = Message(text, event["event"] == "Warned", event["step"])


def _numbers(batch: Sequence[EventFields], name: str) -> np.ndarray:
    return np.array([_number(event.get(name)) for event in batch], float)


def _number(value: Any) -> float:
    """Return the value of a field; NaN and infinities are written as strings."""
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
