"""How a sweep goes, while it goes: a live table on a terminal, plain lines that can be grepped everywhere else."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich import box
from rich.live import Live
from rich.table import Table

from finetune.commands.sweep.plan.grid import SweepRun
from finetune.commands.sweep.running.history import RunHistory
from finetune.commands.sweep.running.schedule import ActiveRun
from finetune.commands.sweep.state.outcome import Outcome, read_status
from finetune.report.console import format_duration, format_metrics
from finetune.runtime.text.rich_console import SafeConsole, styled_stream

SECONDS_BETWEEN_LINES = 30.0


class PlainSweepScreen:
    """A line when a run starts and ends, and one for each active run every half minute; flushed at once."""

    def __init__(self, file: TextIO, *, num_runs: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._num_runs = num_runs
        self._clock = clock
        self._num_started = 0
        self._shown: dict[str, float] = {}

    def start_run(self, active: ActiveRun) -> None:
        """Show that a run has been started, and where its output goes."""
        self._num_started += 1
        self._shown[active.run.name] = self._clock()
        self.log(f"[{self._num_started}/{self._num_runs}] {active.run.name}: started, log in {active.run.log}")

    def update(self, active: list[ActiveRun]) -> None:
        """Show the runs of which nothing was shown for a while."""
        now = self._clock()
        for each in active:
            if now - self._shown[each.run.name] >= SECONDS_BETWEEN_LINES:
                self._shown[each.run.name] = now
                self.log(f"{each.run.name}: {'  '.join(progress_facts(each))}")

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Show how a run has ended."""
        self.log(format_end(run, outcome, history))

    def log(self, line: str) -> None:
        """Write the line."""
        print(line, file=self._file, flush=True)

    def close(self) -> None:
        """Do nothing: every line has been flushed."""


class RichSweepScreen:
    """A table of the active runs at the bottom of the terminal; what ends scrolls above it."""

    def __init__(self, file: TextIO, *, num_runs: int) -> None:
        self._console = SafeConsole(file=styled_stream(file))
        self._num_runs = num_runs
        self._num_ended = 0
        # No thread of its own draws it: processes are forked here.
        self._live = Live(
            console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self._live.start()

    def start_run(self, active: ActiveRun) -> None:
        """Do nothing: the run appears in the table."""

    def update(self, active: list[ActiveRun]) -> None:
        """Draw the table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"{self._num_ended} of {self._num_runs} runs ended")
        for column in ("run", "state", "step", "loss", "tokens/s", "time left"):
            table.add_column(column, no_wrap=column != "run", overflow="fold")
        for each in active:
            table.add_row(each.run.name, *_cells(each))
        self._live.update(table, refresh=True)

    def end_run(self, run: SweepRun, outcome: Outcome, history: RunHistory) -> None:
        """Show how a run has ended, above the table."""
        self._num_ended += 1
        self.log(format_end(run, outcome, history))

    def log(self, line: str) -> None:
        """Print the line above the table."""
        self._console.print(line, soft_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()


def open_screen(file: TextIO, *, num_runs: int) -> PlainSweepScreen | RichSweepScreen:
    """Return the screen for this stream."""
    return (RichSweepScreen if sys.stdout.isatty() and file.isatty() else PlainSweepScreen)(file, num_runs=num_runs)


def progress_facts(active: ActiveRun) -> list[str]:
    """Return `step 40/100`, `loss 2.3101`, `1,234 tokens/s`, `eta 0:01:12`, as far as they are known."""
    _, step, loss, speed, left = _cells(active)
    named = ((f"step {step}", step), (f"loss {loss}", loss), (f"{speed} tokens/s", speed), (f"eta {left}", left))
    return [text for text, value in named if value] or [_state(active)]


def _cells(active: ActiveRun) -> Sequence[str]:
    """Return state, step, loss, tokens per second and time left; empty where they are not known yet."""
    status, history = read_status(active.run.folder), active.history
    step, num_steps = (history.steps[-1] if history.steps else 0), status.get("num_steps")
    if not step or not isinstance(num_steps, int):
        return [_state(active), "", "", "", ""]
    pace = history.seconds / len(history.steps)
    return [
        _state(active),
        f"{step}/{num_steps}",
        f"{history.last_loss:.4f}",
        f"{history.tokens_per_second or 0.0:,.0f}",
        format_duration((num_steps - step) * pace),
    ]


def _state(active: ActiveRun) -> str:
    if active.is_stopping:
        return "saves and stops"
    status = read_status(active.run.folder)
    return "running" if status.get("state") == "running" and active.history.steps else "starting"


def format_end(run: SweepRun, outcome: Outcome, history: RunHistory) -> str:
    """Return one line, or the message of a run that failed below it."""
    facts = [outcome.state]
    if outcome.num_steps:
        facts.append(f"step {outcome.step}/{outcome.num_steps}")
    if history.evaluations:
        facts.append(format_metrics(history.evaluations[-1].metrics))
    elif history.steps:
        facts.append(f"loss {history.last_loss:.4f}")
    first, *more = outcome.message.splitlines() or [""]
    return "\n".join(
        [f"{run.name}: {'  '.join(facts)}{f'  ({first})' if first else ''}", *(f"  {line}" for line in more)]
    )
