"""The console: a progress bar on a terminal, plain lines that can be grepped everywhere else."""

import sys
from collections.abc import Mapping
from typing import Literal, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID

from finetune.report import wording
from finetune.report.events import Evaluated, Event, RunEnded, RunStarted, StepTaken
from finetune.report.throughput import ThroughputMeter
from finetune.runtime.cadence import Cadence
from finetune.runtime.drawing import Bars, ForeignTextConsole, TextColumn


class Screen(Protocol):
    """Where the console's words go."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def show_step(self, event: StepTaken, *, num_steps: int, meter: ThroughputMeter, is_logged: bool) -> None:
        """Show how far the run is."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class ConsoleReporter:
    """Tells a person at a screen what happens; at the end, how far the metrics have come since the first evaluation."""

    def __init__(self, screen: Screen, *, log_every_steps: int = 1) -> None:
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
                self._meter = ThroughputMeter(event.num_steps, unit=wording.unit_of(event.config))
            case StepTaken():
                self._show_step(event)
            case Evaluated():
                self._evaluations.append(event.metrics)
            case RunEnded():
                self._screen.close()
                if event.metrics:
                    before = self._evaluations[0] if len(self._evaluations) > 1 else {}
                    self._screen.say(wording.change_line(before, event.metrics))
        for line in wording.lines(event):
            self._screen.say(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._screen.close()

    def _show_step(self, event: StepTaken) -> None:
        self._meter.add(event)
        logged = Cadence(self._log_every_steps, self._num_steps).due(event.step)
        self._screen.show_step(event, num_steps=self._num_steps, meter=self._meter, is_logged=logged)
        if logged:
            self._meter.pass_log_point()


class PlainScreen:
    """One line for each logged step, flushed at once."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or sys.stdout

    def say(self, line: str) -> None:
        """Write the line."""
        print(line, file=self._file, flush=True)

    def show_step(self, event: StepTaken, *, num_steps: int, meter: ThroughputMeter, is_logged: bool) -> None:
        """Write the step's line if it is to be logged."""
        if is_logged:
            self.say(wording.step_line(event, num_steps=num_steps, meter=meter))

    def close(self) -> None:
        """Do nothing: every line has been flushed."""


class RichScreen:
    """A progress bar at the bottom, which moves at every step; everything else scrolls above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or ForeignTextConsole()
        self._progress: Progress | None = None
        self._bar = TaskID(0)

    def say(self, line: str) -> None:
        """Print the line above the bar, as it is: what a model answers is no markup."""
        style = "yellow" if line.startswith("warning: ") else None
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def show_step(self, event: StepTaken, *, num_steps: int, meter: ThroughputMeter, is_logged: bool) -> None:
        """Move the bar; its numbers change when the step is to be logged."""
        if self._progress is None:
            self._progress = self._start(num_steps)
        self._progress.update(self._bar, completed=event.step)
        if is_logged:
            self._progress.update(self._bar, facts=wording.step_facts(event, meter=meter))

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, num_steps: int) -> Progress:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
        )
        progress = Bars(*columns, console=self._console)
        self._bar = progress.add_task("", total=num_steps, facts="")
        progress.start()
        return progress


def choose_screen(console: Literal["auto", "rich", "plain"]) -> Screen:
    """Return the screen asked for; `auto` takes the bar where standard output is a terminal."""
    wants_bar = console == "rich" or (console == "auto" and sys.stdout.isatty())
    if not wants_bar:
        return PlainScreen()
    return RichScreen(ForeignTextConsole(force_terminal=True) if console == "rich" else None)
