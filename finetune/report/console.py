"""The console: a progress bar on a terminal, plain lines that can be grepped everywhere else.

Events and numbers are formatted by functions without state: plain sentences and aligned numbers, no color.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID

from finetune.registry.tasks import TASKS
from finetune.report.events import (
    Answered,
    CheckpointSaved,
    Evaluated,
    Event,
    Noted,
    Profiled,
    RunEnded,
    RunStarted,
    StartedUp,
    StepSkipped,
    StepTaken,
    Warned,
)
from finetune.report.phases import format_profile
from finetune.report.timing import ThroughputMeter
from finetune.runtime.progress import Cadence
from finetune.runtime.resources import format_size
from finetune.runtime.text.rich_console import SafeConsole, SafeProgress, SafeTextColumn

SLOW_DATA = 0.1
"""Smallest share of time spent waiting for batches that is shown."""


def format_event(event: Event) -> tuple[str, ...]:
    """Return the lines of an event; none for events that the console does not show."""
    match event:
        case RunStarted():
            return (f"strategy {event.strategy}", *event.arithmetic)
        case StartedUp():
            phases = " + ".join(f"{name} {seconds:.1f}" for name, seconds in event.seconds.items())
            return (f"start: {sum(event.seconds.values()):.1f} s = {phases}",)
        case StepSkipped():
            samples = f"; samples {', '.join(map(str, event.sample_ids))} ({event.rows})" if event.sample_ids else ""
            return (f"step {event.step} skipped: {event.reason}{samples}",)
        case Evaluated():
            line = f"evaluated at step {event.step}  {format_metrics(event.metrics)}"
            return (f"{line}  ({event.num_rows:,} rows, {event.seconds:.1f} s)",)
        case Answered():
            names = (("prompt   ", event.prompt), ("answer   ", event.answer), ("reference", event.reference))
            return tuple(f"  {name} {text!r}" for name, text in names)
        case CheckpointSaved():
            times = f"{event.seconds:.1f} s, training waited {event.stall_seconds:.1f} s"
            return (f"checkpoint {event.path}  ({format_size(event.size_bytes)}, {times})",)
        case Profiled():
            return format_profile(event)
        case Noted():
            return (event.message,)
        case Warned():
            return (f"warning: {event.message}",)
        case RunEnded():
            lines = [f"{event.reason} at step {event.step} after {format_hms(event.seconds)}"]
            if event.final_folder is not None:
                lines.append(f"model in {event.final_folder}")
                lines += [f"chat with it: finetune chat {event.final_folder}"] if event.talks else []
            return tuple(lines)
    return ()


def throughput_unit(config: Mapping[str, Any]) -> str:
    """Return the unit of a job's throughput."""
    name = config.get("task", {}).get("name")
    return "tokens" if name not in TASKS or TASKS[name].has_tokens else "images"


def format_step_values(event: StepTaken, *, meter: ThroughputMeter) -> str:
    """Return the numbers of a step, and the share of time spent waiting for data since the last log if it is large."""
    facts = [
        f"loss {event.loss:.4f}",
        *([format_metrics(event.metrics)] if event.metrics else []),
        f"lr {event.learning_rate:.1e}",
        f"grad {event.gradient_norm:.2f}",
        f"{meter.tokens_per_second:>7,.0f} {meter.unit}/s",
        f"eta {format_hms(meter.seconds_left)}",
        f"mem {format_size(event.memory_bytes)}",
    ]
    if meter.data_share >= SLOW_DATA:
        facts.append(f"waiting for data {meter.data_share:.0%}")
    return "  ".join(facts)


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as `exact_match 1.0000  loss 0.0213`, by name."""
    return "  ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items()))


def format_metric_changes(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """Return metrics as `exact_match 0.0000 -> 1.0000`; new metrics have only their value."""
    return "  ".join(
        f"{name} {before[name]:.4f} -> {value:.4f}" if name in before else f"{name} {value:.4f}"
        for name, value in sorted(after.items())
    )


def format_hms(seconds: float | None) -> str:
    """Return hours, minutes and seconds (`0:01:12`); `-:--:--` when unknown."""
    if seconds is None:
        return "-:--:--"
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class ConsoleReporter:
    """Shows events on a screen and, at the end, the changes of the metrics since the first evaluation."""

    def __init__(self, screen: "PlainScreen", *, log_every_steps: int = 1) -> None:
        self._screen = screen
        self._log_every_steps = log_every_steps
        self._num_steps = 0
        self._meter = ThroughputMeter(0)
        self._evaluations: list[Mapping[str, float]] = []

    def __call__(self, event: Event) -> None:
        """Show the event."""
        match event:
            case RunStarted():
                self._num_steps = event.num_steps
                self._meter = ThroughputMeter(event.num_steps, unit=throughput_unit(event.config))
            case StepTaken():
                self._meter.add(event)
                logged = Cadence(self._log_every_steps, self._num_steps).due(event.step)
                self._screen.show_step(event, num_steps=self._num_steps, meter=self._meter, is_logged=logged)
                if logged:
                    self._meter.reset_data_share()
            case Evaluated():
                self._evaluations.append(event.metrics)
            case RunEnded():
                self._screen.close()
                if event.metrics:
                    before = self._evaluations[0] if len(self._evaluations) > 1 else {}
                    self._screen.print_line(format_metric_changes(before, event.metrics))
        for line in format_event(event):
            self._screen.print_line(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._screen.close()


class PlainScreen:
    """One line for each logged step, flushed at once."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout

    def print_line(self, line: str) -> None:
        """Write the line."""
        print(line, file=self._file, flush=True)

    def show_step(self, event: StepTaken, *, num_steps: int, meter: ThroughputMeter, is_logged: bool) -> None:
        """Write the line of a logged step."""
        if is_logged:
            line = f"step {event.step:>{len(str(num_steps))}}/{num_steps}  {format_step_values(event, meter=meter)}"
            self.print_line(line)

    def close(self) -> None:
        """Do nothing: every line has been flushed."""


class RichScreen(PlainScreen):
    """A progress bar that advances at every step; all other lines scroll above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or SafeConsole()
        self._progress: Progress | None = None
        self._bar = TaskID(0)

    def print_line(self, line: str) -> None:
        """Print the line above the bar, without markup: it may be a model's output."""
        style = "yellow" if line.startswith("warning: ") else None
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def show_step(self, event: StepTaken, *, num_steps: int, meter: ThroughputMeter, is_logged: bool) -> None:
        """Advance the bar; its numbers change only at logged steps."""
        if self._progress is None:
            columns = (
                SafeTextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=20),
                SafeTextColumn("{task.fields[facts]}"),
            )
            self._progress = SafeProgress(*columns, console=self._console)
            self._bar = self._progress.add_task("", total=num_steps, facts="")
            self._progress.start()
        self._progress.update(self._bar, completed=event.step)
        if is_logged:
            self._progress.update(self._bar, facts=format_step_values(event, meter=meter))

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def choose_screen(console: Literal["auto", "rich", "plain"]) -> PlainScreen:
    """Return the requested screen; `auto` chooses the bar if standard output is a terminal."""
    wants_bar = console == "rich" or (console == "auto" and sys.stdout.isatty())
    if not wants_bar:
        return PlainScreen()
    return RichScreen(SafeConsole(force_terminal=True) if console == "rich" else None)
