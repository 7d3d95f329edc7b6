"""Reads events.jsonl: its events, validated by the classes of events.py, and the history of a run.

The file of a killed run may end in a partial line, and other lines may have been damaged: lines that are not events are
skipped and counted.
"""

import json
import math
import re
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from finetune.report.console import throughput_unit
from finetune.report.events import is_event
from finetune.report.restarts import RestartHistory
from finetune.runtime.files.read import open_regular, parse_json, read_regular, require_regular
from finetune.runtime.optional import no_op

EVENTS_FILE = "events.jsonl"

EventFields = Mapping[str, Any]
MAX_MESSAGES, MAX_ROWS, MAX_PROMPTS, MAX_ANSWERS, MAX_CHARACTERS = 300, 100, 50, 40, 4000
_RECENT_STEPS = 50
_CURVES = ("loss", "gradient_norm", "learning_rate", "data_share", "memory_bytes", "epoch")
_WORLD = re.compile(r"\b(\d+) process(?:es)?\b")
_STEP_VALUES = ("loss", "gradient_norm", "num_targets", "num_tokens", "seconds", "data_seconds")
_CHUNK_BYTES = 4 << 20

MAX_BUCKETS = 1024
"""A long curve is drawn by at most this many buckets of consecutive points: two points and a mean of each."""


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the file's events in order, without partial and damaged lines."""
    events, _ = parse_events(read_regular(path))
    return events


def parse_events(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the events of these lines in order, and the number of lines that are not events, blank ones aside."""
    lines = [line for line in content.split(b"\n") if line.strip()]
    try:
        values: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        values = []
    if len(values) != len(lines):
        values = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                values.append(parse_json(line))
    events = [value for value in values if is_event(value)]
    return events, len(lines) - len(events)


@dataclass(frozen=True)
class Points:
    """The points to draw: measured extremes in order, and the means of groups of `width` consecutive points."""

    steps: np.ndarray
    values: np.ndarray
    mean_steps: np.ndarray
    means: np.ndarray
    width: int  # 1: every point is drawn


class Curve:
    """A value by step."""

    def __init__(self) -> None:
        self._steps = array("d")
        self._values = array("d")

    def add(self, step: float, value: float) -> None:
        """Add a point, removing earlier ones from its step on."""
        if self._steps and step <= self._steps[-1]:
            self.cut_after(step - 1)
        self._steps.append(step)
        self._values.append(value)

    def cut_after(self, step: float) -> None:
        """Remove the points after the step, which will be repeated."""
        count = bisect_right(self._steps, step)
        del self._steps[count:], self._values[count:]

    @property
    def last(self) -> float:
        """Return the last value; 0 without one."""
        return self._values[-1] if self._values else 0.0

    @property
    def num_not_finite(self) -> int:
        """Return the number of values that cannot be drawn."""
        return int((~np.isfinite(np.array(self._values))).sum())

    def points(self) -> Points:
        """Return the points to draw: all of a short curve, the extremes of each bucket of a long one."""
        steps, values = np.array(self._steps), np.array(self._values)
        is_finite = np.isfinite(values)
        steps, values, width = steps[is_finite], values[is_finite], 1
        while len(values) > width * MAX_BUCKETS:
            width *= 2
        if width == 1:
            return Points(steps, values, steps, values, width)
        padding = np.full(-len(values) % width, np.nan)
        buckets = np.concatenate([values, padding]).reshape(-1, width)
        lows, highs = np.nanargmin(buckets, axis=1), np.nanargmax(buckets, axis=1)
        extremes = np.unique(np.concatenate([lows, highs]) + np.tile(np.arange(len(buckets)) * width, 2))
        middles = np.nanmean(np.concatenate([steps, padding]).reshape(-1, width), axis=1)
        return Points(steps[extremes], values[extremes], middles, np.nanmean(buckets, axis=1), width)


@dataclass(frozen=True)
class Evaluation:
    """The metrics of one evaluation."""

    step: int
    metrics: Mapping[str, float]


class Steps:
    """Every step of a run once, in order; a repeated step has its last values."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._samples = array("Q")
        self._values = {name: array("d") for name in _STEP_VALUES}

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def numbers(self) -> np.ndarray:  # [steps], int64
        """Return the number of each step."""
        return np.array(self._numbers, np.int64)

    @property
    def samples(self) -> np.ndarray:  # [steps], uint64
        """Return the start of the digest of all samples consumed up to each step; 0 if it is unknown."""
        return np.array(self._samples, np.uint64)

    @property
    def losses(self) -> np.ndarray:
        """Return the training loss of each step."""
        return self.values("loss")

    def values(self, name: str) -> np.ndarray:  # [steps], float64
        """Return a field of StepTaken at each step; NaN if it is missing."""
        return np.array(self._values[name], float)

    def add(self, event: EventFields) -> None:
        """Add a step, and remove earlier entries from its number on."""
        if self._numbers and event["step"] <= self._numbers[-1]:
            self.cut_after(event["step"] - 1)
        self._numbers.append(event["step"])
        self._samples.append(int((event.get("samples_sha256") or "0")[:16], 16))
        for name, values in self._values.items():
            values.append(_number(event.get(name)))

    def cut_after(self, step: int) -> None:
        """Remove the steps after this one, which will be repeated."""
        count = bisect_right(self._numbers, step)
        del self._numbers[count:], self._samples[count:]
        for values in self._values.values():
            del values[count:]


@dataclass
class Message:
    """A warning or a note; the same text is kept once."""

    text: str
    is_warning: bool
    step: int
    count: int = 1


@dataclass
class PromptAnswers:
    """The answers to one prompt by step."""

    prompt: str
    reference: str
    by_step: dict[int, str] = field(default_factory=dict)


class RunHistory:
    """The state of a run according to its events; a repeated step has its last values.

    `seconds` is the time in steps, evaluations and waiting for saves, including steps lost in a crash, without
    start-up and the time between two starts. `device_seconds` is the same, multiplied by the number of processes.
    """

    def __init__(self) -> None:
        self.steps = Steps()
        self.evaluations: list[Evaluation] = []
        self.curves: dict[str, Curve] = {}
        self.starts: list[EventFields] = []
        self.ended: EventFields | None = None  # RunEnded of the last start
        self.last_step: EventFields = {}
        self.updated = 0.0  # unix seconds of the last event
        self.num_processes = 1
        self.recent: deque[EventFields] = deque(maxlen=_RECENT_STEPS)
        self.messages: dict[str, Message] = {}
        self.skipped: deque[EventFields] = deque(maxlen=MAX_ROWS)
        self.num_skipped = 0
        self.checkpoints: deque[EventFields] = deque(maxlen=MAX_ROWS)
        self.answers: dict[tuple[str, str], PromptAnswers] = {}
        self.tokens = self.seconds = self.device_seconds = 0.0
        self.startup_seconds = 0.0
        self.restarts = RestartHistory()
        self.num_damaged_lines = 0

    def add(self, events: Sequence[EventFields], *, num_damaged: int = 0) -> None:
        """Add events in the order of the file, and the number of damaged lines among them."""
        self.num_damaged_lines += num_damaged
        for event in events:
            self.updated = max(self.updated, _number(event.get("time", 0)))
            try:
                self._add_event(event)
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
        """Return the unit of throughput: tokens or images."""
        return throughput_unit(self.starts[-1].get("config") or {} if self.starts else {})

    @property
    def damaged(self) -> tuple[str, ...]:
        """Return a message with the number of skipped lines; empty if there are none."""
        return (f"{self.num_damaged_lines:,} lines of events.jsonl (skipped)",) if self.num_damaged_lines else ()

    def _add_event(self, event: EventFields) -> None:
        """Add an event; unknown events of later versions are ignored."""
        match event["event"]:
            case "StepTaken":
                self._add_step(event)
            case "RunStarted":
                self._start(event)
            case "StartedUp":
                self.restarts.started_up(event)
                self.startup_seconds += sum(map(_number, event["seconds"].values()))
            case "StepSkipped":
                self.skipped.append(event)
                self.num_skipped += 1
            case "Evaluated":
                self._spend(event["seconds"])
                metrics = {name: _number(value) for name, value in event["metrics"].items()}
                self.evaluations.append(Evaluation(event["step"], metrics))
                self._add_values(event["step"], {f"evaluation/{name}": value for name, value in metrics.items()})
            case "Answered":
                self._add_answer(event)
            case "CheckpointSaved":
                self._spend(event["stall_seconds"])
                self.checkpoints.append(event)
                self._add_values(
                    event["step"], {"stall_seconds": event["stall_seconds"], "save_seconds": event["seconds"]}
                )
            case "Noted" | "Warned":
                self._add_message(event)
            case "RunEnded":
                self.ended = event
                self.restarts.end(event)

    def _start(self, event: EventFields) -> None:
        if len(self.starts) >= MAX_ROWS:
            del self.starts[1]
        self.starts.append(event)
        self.ended = None
        if match := _WORLD.search(" ".join([*map(str, event.get("arithmetic", ())), str(event.get("strategy", ""))])):
            self.num_processes = int(match[1])
        self.restarts.start(event, num_devices=self.num_processes)
        self.steps.cut_after(event["step"])
        self.evaluations = [evaluation for evaluation in self.evaluations if evaluation.step <= event["step"]]
        if self.step > event["step"]:
            self._go_back(event["step"])

    def _go_back(self, step: int) -> None:
        """Remove everything after the step."""
        for curve in self.curves.values():
            curve.cut_after(step)
        self.tokens = self.curves["tokens"].last if "tokens" in self.curves else 0.0
        self.last_step = {**self.last_step, "step": step}
        self.recent.clear()
        self.num_skipped -= sum(row["step"] > step for row in self.skipped)
        for rows in (self.skipped, self.checkpoints):
            for row in [row for row in rows if row["step"] > step]:
                rows.remove(row)
        for answers in self.answers.values():
            answers.by_step = {at: text for at, text in answers.by_step.items() if at <= step}

    def _add_step(self, event: EventFields) -> None:
        if self.last_step and event["step"] <= self.step:
            self._go_back(event["step"] - 1)
        self.restarts.step_taken(event)
        self.steps.add(event)
        self.last_step = event
        if all(name in event for name in ("loss", "seconds", "num_tokens")):
            self.recent.append(event)
        seconds, tokens = _number(event.get("seconds")), _number(event.get("num_tokens"))
        self._spend(seconds)
        self.tokens += tokens if math.isfinite(tokens) else 0.0
        rate = tokens / seconds if seconds > 0 else math.nan
        start = self.starts[-1] if self.starts else {}
        values = {name: event.get(name) for name in _CURVES}
        values |= {"tokens_per_second": rate, "seconds_per_step": seconds}
        if (per_token := start.get("flops_per_token")) and (peak := start.get("peak_flops_per_second")):
            values["mfu"] = rate * _number(per_token) / _number(peak)
        for group in ("metrics", "device"):
            values |= {f"{group}/{name}": value for name, value in (event.get(group) or {}).items()}
        values |= {"tokens": self.tokens, "seconds": self.seconds}
        self._add_values(event["step"], values)

    def _add_values(self, step: int, values: EventFields) -> None:
        """Add a point to each curve, replacing that of an earlier start at the same step."""
        for name, value in values.items():
            if value is not None:
                self.curves.setdefault(name, Curve()).add(step, _number(value))

    def _spend(self, seconds: Any) -> None:
        spent = _number(seconds)
        self.seconds += spent if math.isfinite(spent) else 0.0
        self.device_seconds += spent * self.num_processes if math.isfinite(spent) else 0.0

    def _add_answer(self, event: EventFields) -> None:
        prompt, reference, answer = (str(event[name])[:MAX_CHARACTERS] for name in ("prompt", "reference", "answer"))
        if (prompt, reference) not in self.answers and len(self.answers) >= MAX_PROMPTS:
            return
        answers = self.answers.setdefault((prompt, reference), PromptAnswers(prompt, reference))
        answers.by_step[event["step"]] = answer
        if len(answers.by_step) > MAX_ANSWERS:  # keep the first and the newest
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


class HistoryReader:
    """Adds the new lines of an events.jsonl to a history; every line is parsed only once."""

    def __init__(self, path: Path) -> None:
        self.history = RunHistory()
        self._path = path
        self._offset = 0

    def read_new(self, *, after_chunk: Callable[[], object] = no_op) -> None:
        """Read the complete lines, if the file exists.

        A file that became shorter was replaced: it is read from its start. `after_chunk` is called after
        each chunk of some MB.
        """
        with suppress(FileNotFoundError), open_regular(self._path) as file:
            if file.seek(0, 2) < self._offset:
                self.history, self._offset = RunHistory(), 0
            file.seek(self._offset)
            rest = b""
            while chunk := file.read(_CHUNK_BYTES):
                whole, end, rest = (rest + chunk).rpartition(b"\n")
                if end:
                    events, num_damaged = parse_events(whole)
                    self.history.add(events, num_damaged=num_damaged)
                    self._offset += len(whole) + 1
                    after_chunk()


def read_history(run_folder: Path) -> RunHistory:
    """Return the history of the run in the folder, every step included; raises OSError without an events.jsonl."""
    path = run_folder / EVENTS_FILE
    require_regular(path)
    reader = HistoryReader(path)
    reader.read_new()
    return reader.history


def _number(value: Any) -> float:
    """Return the value of a field; NaN and infinities are written as strings."""
    if isinstance(value, int | float):
        return float(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
