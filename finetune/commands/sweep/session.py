"""One call of `finetune sweep`: what was asked, what the folder remembers, and the runs under the scheduler."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from finetune.commands.sweep.plan.axes import Axis, value_text
from finetune.commands.sweep.plan.grid import SweepRun, Values, job_facts, load_run, make_run
from finetune.commands.sweep.plan.launch import LaunchPlan
from finetune.commands.sweep.results.page import write_page
from finetune.commands.sweep.results.ranking import Objective, RunResult, rank, read_result
from finetune.commands.sweep.running.prepare import prepare_data, shared_data
from finetune.commands.sweep.running.process import Start, StopSignals, start_process
from finetune.commands.sweep.running.schedule import POLL_SECONDS, RunSource, Scheduler
from finetune.commands.sweep.running.screen import open_screen
from finetune.commands.sweep.state.book import SweepBook
from finetune.commands.sweep.state.outcome import FAILED, OVER
from finetune.commands.sweep.state.record import RecordedRun, SweepState, read_state, require_same_job
from finetune.config.load import LoadedConfig
from finetune.config.paths import is_url
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.runtime.supervision.writer_lock import is_locked
from finetune.runtime.text.redact import redacted_command


@dataclass(frozen=True)
class SweepRequest:
    """The words of the command line."""

    job: Path
    overrides: tuple[str, ...] = ()
    processes_per_run: int | None = None
    accelerate: Path | None = None
    folder: Path | None = None
    at_once: int | None = None
    metric: str | None = None
    search: int | None = None
    seed: int = 0
    max_runs: int = 100
    retries_failed: bool = False
    is_dry_run: bool = False
    as_json: bool = False

    @property
    def output(self) -> TextIO:
        """Return where progress is printed: JSON alone goes to standard output."""
        return sys.stderr if self.as_json else sys.stdout

    @property
    def command(self) -> list[str]:
        """Return the words that continue this sweep, without secrets."""
        options = {
            "--processes-per-run": self.processes_per_run,
            "--accelerate": self.accelerate,
            "--folder": self.folder,
            "--at-once": self.at_once,
            "--metric": self.metric,
            "--search": self.search,
        }
        words = ["finetune", "sweep", "--config", str(self.job)]
        words += [word for text in self.overrides for word in ("--set", text)]
        words += [word for name, value in options.items() if value is not None for word in (name, str(value))]
        return redacted_command(words)


def sweep_folder(request: SweepRequest, config: RunConfig) -> Path:
    """Return the folder of the sweep: the one that was named, or one beside the job's run folder."""
    if request.folder is not None:
        return request.folder.absolute()
    if is_url(config.run.folder):
        raise UserError(
            "--folder: the job's run.folder is a URL, and a sweep is written to a folder of this machine. Name one."
        )
    return Path(f"{config.run.folder}-sweep")


def open_state(folder: Path, config: RunConfig, *, swept: Sequence[str], job: Path) -> SweepState:
    """Return what the folder remembers, or a new state; raises UserError where it is another job's.

    A key that is swept for the first time had one value in all runs so far: they keep their names with it.
    """
    state = read_state(folder)
    if state is None:
        return SweepState(str(job), job_facts(config, swept=swept), tuple(swept))
    union = tuple(dict.fromkeys([*state.swept, *swept]))
    facts = job_facts(config, swept=union)
    require_same_job(state, facts, swept=frozenset(swept), folder=folder)
    runs = {name: replace(run, values=_with_facts(run, state.facts, swept)) for name, run in state.runs.items()}
    return SweepState(state.job, facts, union, runs)


def _with_facts(run: RecordedRun, facts: Mapping[str, str], swept: Iterable[str]) -> Values:
    former = {key: json.loads(facts[key]) for key in swept if key not in run.values and key in facts}
    return {**run.values, **former}


_SECONDS_BETWEEN_PAGES = 60.0


@dataclass
class SweepSession:
    """A sweep that is going on; nothing of it is shared with another call."""

    request: SweepRequest
    plan: LaunchPlan
    axes: Sequence[Axis]
    objective: Objective
    book: SweepBook
    stop: StopSignals
    start: Start = start_process
    _drawn_at: float = -_SECONDS_BETWEEN_PAGES

    @property
    def folder(self) -> Path:
        """Return the sweep's folder."""
        return self.book.folder

    def log(self, line: str) -> None:
        """Print a line of progress."""
        print(line, file=self.request.output, flush=True)

    def is_due(self, run: SweepRun) -> bool:
        """Tell whether the run is to be started: one that failed only where that was asked for."""
        state = self.book.outcome(run).state
        return state not in OVER and (state != FAILED or self.request.retries_failed)

    def load(self, run: SweepRun) -> LoadedConfig:
        """Return the run's config; raises UserError where the job file is no longer what the sweep was started with."""
        loaded = load_run(self.request.job, run, num_processes=self.plan.num_processes)
        swept = self.book.state.swept
        facts = job_facts(loaded.config, swept=swept)
        require_same_job(self.book.state, facts, swept=frozenset(swept), folder=self.folder)
        return loaded

    def wait_for_writers(self) -> None:
        """Wait until no process of an earlier call writes to a run: killed with it, they save and end."""
        has_logged = False
        for run in map(self.recorded_run, self.book.state.runs.values()):
            while is_locked(run.folder) and self.stop.first is None:
                if not has_logged:
                    has_logged = True
                    self.log(f"waiting for {run.folder}, which a run of an earlier call still writes")
                time.sleep(POLL_SECONDS)

    def prepare(
        self, runs: Sequence[SweepRun], loaded: Mapping[str, LoadedConfig]
    ) -> Iterator[tuple[Sequence[SweepRun], str]]:
        """Tokenize the data that several of the runs share; yield those for which it failed, with the message."""
        for number, group in enumerate(shared_data(runs, loaded), start=1):
            if self.stop.first is not None:
                return
            self.log("preparing the data that the runs share")
            message = prepare_data(
                group, number=number, plan=self.plan, folder=self.folder, stop=self.stop, start=self.start
            )
            if message is not None:
                yield group, message

    def run_all(self, source: RunSource, *, num_runs: int) -> None:
        """Run what the source gives, to its end or to a signal."""
        with closing(open_screen(self.request.output, num_runs=num_runs)) as screen:
            scheduler = Scheduler(self.plan, self.book, screen, self.stop, self.load, self.draw, start=self.start)
            scheduler.run_all(source)

    def draw(self) -> None:
        """Write the page with the curves of all runs, once a minute at most."""
        if time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_PAGES:
            self._drawn_at = time.monotonic()
            write_page(self.results(), self.folder)

    def results(self) -> list[RunResult]:
        """Return the results of all runs that the sweep has ever had, the best first."""
        runs = [self.recorded_run(record) for record in self.book.state.runs.values()]
        return rank((read_result(run, self.book.outcome(run), self.objective) for run in runs), self.objective)

    def recorded_run(self, record: RecordedRun) -> SweepRun:
        """Return a run as it was recorded; secrets, which are not recorded, are those of the words typed now."""
        fixed = [axis for axis in self.axes if axis.key not in record.values]
        typed = {(axis.key, value_text(value)): value for axis in self.axes for value in axis.values}
        values = {key: typed.get((key, value_text(value)), value) for key, value in record.values.items()}
        own = [Axis(key, (value,), "") for key, value in values.items()]
        return make_run(values, [*own, *fixed], name=record.name, folder=self.folder)
