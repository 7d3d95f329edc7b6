"""The progress of a sweep: a live table on a terminal, plain lines otherwise."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO

from rich import box
from rich.live import Live
from rich.table import Table

from finetune.commands.sweep.results import step_seconds, tokens_per_second
from finetune.commands.sweep.runs import Outcome, SweepRun, read_status
from finetune.report.console import format_duration, format_metrics
from finetune.report.history import RunHistory
from finetune.runtime.text.rich_console import SafeConsole, styled_stream

SECONDS_BETWEEN_LINES = 30.0

Progress = tuple[SweepRun, RunHistory, bool]
"""A run, its history, and whether it is stopping."""


class SweepScreen:
    """A line when a run starts and ends, and one for each active run every half minute; flushed immediately."""

    def __init__(self, file: TextIO, *, num_runs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._num_runs = num_runs
        self._clock = clock
        self._num_started = 0
        self._shown_at: dict[str, float] = {}

    def start_run(self, run: SweepRun) -> None:
        """Show that a run was started, and its log file."""
        self._num_started += 1
        self._shown_at[run.name] = self._clock()
        self.log(f"[{self._num_started}/{self._num_runs}] {run.name}: started, log in {run.log}")

    def update(self, active: Sequence[Progress]) -> None:
        """Show the active runs that were not shown recently."""
        now = self._clock()
        for run, history, is_stopping in active:
            if now - self._shown_at[run.name] >= SECONDS_BETWEEN_LINES:
                self._shown_at[run.name] = now
                self.log(f"{run.name}: {'  '.join(progress_facts(_cells(run, history, is_stopping)))}")

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Show how a run has ended."""
        self.log(format_end(run, outcome, history))

    def log(self, line: str) -> None:
        """Write the line."""
        print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing: every line has been flushed."""


class LiveSweepScreen(SweepScreen):
    """A table of the active runs at the bottom of the terminal; lines about ended runs scroll above it."""

    def __init__(self, file: TextIO, *, num_runs: int) -> None:
        super().__init__(file, num_runs=num_runs)
        self._console = SafeConsole(file=styled_stream(file))
        self._num_ended = 0
        # Without a thread that redraws it: this process forks.
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def start_run(self, run: SweepRun) -> None:
        """Do nothing: the run appears in the table."""

    def update(self, active: Sequence[Progress]) -> None:
        """Draw the table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{self._num_ended} of {self._num_runs} runs ended")
        for column in ("run", "state", "step", "loss", "tokens/s", "time left"):
            table.add_column(column, no_wrap=column != "run", overflow="fold")
        for run, history, is_stopping in active:
            table.add_row(run.name, *_cells(run, history, is_stopping))
        self._live.update(table, refresh=True)

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Show how a run has ended, above the table."""
        self._num_ended += 1
        super().end_run(run, outcome, history)

    def log(self, line: str) -> None:
        """Print the line above the table."""
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Restore the terminal."""
        self._live.stop()


def open_screen(file: TextIO, *, num_runs: int) -> SweepScreen:
    """Return the screen for this stream."""
    return (LiveSweepScreen if sys.stdout.isatty() and file.isatty() else SweepScreen)(file, num_runs=num_runs)


class _Cells(NamedTuple):
    """State and numbers of an active run; empty while they are unknown."""

    state: str
    step: str = ""
    loss: str = ""
    speed: str = ""
    time_left: str = ""


def progress_facts(cells: _Cells) -> list[str]:
    """Return `step 40/100`, `loss 2.3101`, `1,234 tokens/s`, `eta 0:01:12`; the state alone before the first step."""
    if not cells.step:
        return [cells.state]
    return [f"step {cells.step}", f"loss {cells.loss}", f"{cells.speed} tokens/s", f"eta {cells.time_left}"]


def _cells(run: SweepRun, history: RunHistory, is_stopping: bool) -> _Cells:
    status = read_status(run.folder)
    is_running = status.get("state") == "running" and history.steps
    state = "stopping" if is_stopping else "running" if is_running else "starting"
    num_steps = status.get("num_steps")
    if not history.steps or not isinstance(num_steps, int):
        return _Cells(state)
    time_left = (num_steps - history.step) * step_seconds(history) / len(history.steps)
    return _Cells(
        state,
        f"{history.step}/{num_steps}",
        f"{history.steps.losses[-1]:.4f}",
        f"{tokens_per_second(history) or 0.0:,.0f}",
        format_duration(time_left),
    )


def format_end(run: SweepRun, outcome: Outcome, history: RunHistory) -> str:
    """Return one line, followed by the rest of the message of a run that failed."""
    facts = [outcome.state]
    if outcome.num_steps:
        facts.append(f"step {outcome.step}/{outcome.num_steps}")
    if history.evaluations:
        facts.append(format_metrics(history.evaluations[-1].metrics))
    elif history.steps:
        facts.append(f"loss {history.steps.losses[-1]:.4f}")
    first, *more = outcome.message.splitlines() or [""]
    line = f"{run.name}: {'  '.join(facts)}{f'  ({first})' if first else ''}"
    return "\n".join([line, *(f"  {text}" for text in more)])
