"""The progress of a sweep: a live table on a terminal, plain lines otherwise."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich import box
from rich.live import Live
from rich.table import Table

from finetune.commands.sweep.results import step_seconds, tokens_per_second
from finetune.commands.sweep.runs import Outcome, SweepRun
from finetune.report.console import format_duration, format_metrics
from finetune.report.history import RunHistory
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.rich_console import SafeConsole, styled_stream

SECONDS_BETWEEN_LINES = 30.0

Progress = tuple[SweepRun, RunHistory, bool]
"""A run, its history, and whether it is stopping."""


class SweepScreen:
    """Lines about runs that end, and the active runs: in a table below on a terminal, else in lines every 30 s."""

    def __init__(self, file: TextIO, *, num_runs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._num_runs = num_runs
        self._clock = clock
        self._num_started = self._num_ended = 0
        self._shown_at: dict[str, float] = {}
        self._live: Live | None = None
        if sys.stdout.isatty() and file.isatty():
            # Without a thread that redraws it: this process forks.
            console = SafeConsole(file=styled_stream(file))
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()

    def start_run(self, run: SweepRun) -> None:
        """Show that a run was started, and its log file; it appears in the table by itself."""
        self._num_started += 1
        self._shown_at[run.name] = self._clock()
        if self._live is None:
            self.log(f"[{self._num_started}/{self._num_runs}] {run.name}: started, log in {run.log}")

    def update(self, active: Sequence[Progress]) -> None:
        """Draw the table, or print the active runs that were not shown recently."""
        if self._live is not None:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            table.title = f"{self._num_ended} of {self._num_runs} runs ended"
            for column in ("run", "state", "step", "loss", "tokens/s", "time left"):
                table.add_column(column, no_wrap=column != "run", overflow="fold")
            for run, history, is_stopping in active:
                table.add_row(run.name, *_cells(run, history, is_stopping))
            self._live.update(table, refresh=True)
            return
        now = self._clock()
        for run, history, is_stopping in active:
            if now - self._shown_at[run.name] >= SECONDS_BETWEEN_LINES:
                self._shown_at[run.name] = now
                state, step, loss, speed, time_left = _cells(run, history, is_stopping)
                facts = f"step {step}  loss {loss}  {speed} tokens/s  eta {time_left}" if step else state
                self.log(f"{run.name}: {facts}")

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Show how a run has ended, in one line, followed by the rest of the message of a run that failed."""
        self._num_ended += 1
        facts = [outcome.state]
        if outcome.num_steps:
            facts.append(f"step {outcome.step}/{outcome.num_steps}")
        if history.evaluations:
            facts.append(format_metrics(history.evaluations[-1].metrics))
        elif history.steps:
            facts.append(f"loss {history.steps.losses[-1]:.4f}")
        first, *more = outcome.message.splitlines() or [""]
        line = f"{run.name}: {'  '.join(facts)}{f'  ({first})' if first else ''}"
        self.log("\n".join([line, *(f"  {text}" for text in more)]))

    def log(self, line: str) -> None:
        """Print the line, above the table if there is one."""
        if self._live is not None:
            self._live.console.print(line, soft_wrap=True)
        else:
            print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._live is not None:
            self._live.stop()


def _cells(run: SweepRun, history: RunHistory, is_stopping: bool) -> tuple[str, str, str, str, str]:
    """Return state, step, loss, tokens per second and time left of an active run; empty while they are unknown."""
    status = read_status(run.folder)
    is_running = status.get("state") == "running" and history.steps
    state = "stopping" if is_stopping else "running" if is_running else "starting"
    num_steps = status.get("num_steps")
    if not history.steps or not isinstance(num_steps, int):
        return state, "", "", "", ""
    time_left = (num_steps - history.step) * step_seconds(history) / len(history.steps)
    return (
        state,
        f"{history.step}/{num_steps}",
        f"{history.steps.losses[-1]:.4f}",
        f"{tokens_per_second(history) or 0.0:,.0f}",
        format_duration(time_left),
    )
