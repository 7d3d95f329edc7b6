"""Starts a run in each free slot with its share of devices and threads, watches the runs, and stops them gracefully.

Their progress is a live table on a terminal, plain lines otherwise.

Each process has its own session, so that Ctrl-C reaches only the sweep, and ends with the sweep.
"""

import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.live import Live
from rich.table import Table

from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.commands.sweep.results import step_seconds, tokens_per_second
from finetune.commands.sweep.runs import LOGS_FOLDER, Outcome, SweepRun, own_overrides
from finetune.commands.sweep.study import SweepStudy
from finetune.config.load import LoadedConfig
from finetune.errors import UserError
from finetune.launch.child import end_of_log, kill_child, start_child, train_command
from finetune.report.console import format_duration, format_metrics
from finetune.report.history import EVENTS_FILE, HistoryReader, RunHistory
from finetune.runtime.processes import free_port
from finetune.runtime.resources import usable_cores
from finetune.runtime.run_folder import is_locked
from finetune.runtime.supervision.status import read_status
from finetune.runtime.text.rich_console import SafeConsole, styled_stream
from finetune.runtime.text.terminal import printable

POLL_SECONDS, WATCH_SECONDS = 0.1, 1.0
STOP_FILE = "STOP"

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_SHUTDOWN_SECONDS = "600"
"""Time for ranks to save after SIGTERM, unless the environment sets it; torchelastic's default is 30 s."""

_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"

Start = Callable[..., Any]
"""Starts a command, with the signature of `start_child`, and returns a process that is polled and sent signals."""

LOST_HOST = -1000
"""Exit code of a process whose host is lost: the run is started again."""

MAX_LOST = 5
"""Hosts that a run may lose, one after the other: it may be what brings them down."""


@dataclass(frozen=True)
class HostResources:
    """What a host of a Ray cluster has for runs."""

    num_cores: int
    num_gpus: int


@dataclass(frozen=True)
class LaunchPlan:
    """The processes, the launcher and the devices of each run."""

    job: Path
    num_processes: int
    accelerate_config: Path | None
    at_once: int
    devices: tuple[str, ...]  # names for CUDA_VISIBLE_DEVICES; empty on a machine without devices
    num_cores: int
    sequence_size: int = 1  # processes that share each microbatch

    @property
    def data_parallel_size(self) -> int:
        """Return the number of microbatches that a run computes at a time."""
        return self.num_processes // self.sequence_size

    def command(self, run: SweepRun, loaded: LoadedConfig) -> list[str]:
        """Return the command that trains the run, or resumes it; with a free port."""
        return train_command(
            self.job,
            overrides=[*run.overrides, *own_overrides(run, loaded)],
            accelerate_config=self.accelerate_config,
            num_processes=self.num_processes,
            port=free_port(),
        )

    def environment(self, slot: int) -> dict[str, str]:
        """Return the devices and threads of a run in this slot, as environment variables."""
        share = max(1, self.num_cores // (self.at_once * self.num_processes))
        chosen = {"OMP_NUM_THREADS": str(share), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _SHUTDOWN_SECONDS}
        variables = {name: os.environ.get(name) or value for name, value in chosen.items()}
        if self.devices:
            first = slot * self.num_processes
            own = [self.devices[(first + rank) % len(self.devices)] for rank in range(self.num_processes)]
            variables[VISIBLE_DEVICES] = ",".join(own)
        return variables


def plan_launch(
    job: Path,
    *,
    num_processes: int | None,
    accelerate_config: Path | None,
    at_once: int | None,
    hosts: Sequence[HostResources] | None = None,
) -> LaunchPlan:
    """Return the plan for launching the runs; raises UserError if this machine, or no host, can run them.

    The default number at once is devices / processes, or one on a machine without devices. On hosts of a Ray cluster
    it is the number for which there are GPUs, or on a cluster without GPUs cores; Ray gives them to each run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("sweep: start it without a launcher. It launches each run itself; see --accelerate.")
    processes, sequence_size = num_processes or 1, 1
    if accelerate_config is not None:
        file = read_accelerate_file(accelerate_config)
        if file.num_machines > 1:
            raise UserError(
                f"--accelerate {accelerate_config}: num_machines is {file.num_machines}. A sweep starts each run on "
                "one machine."
            )
        processes, sequence_size = num_processes or file.num_processes, file.num_processes // file.data_parallel_size
    if hosts is not None:
        has_gpus = any(host.num_gpus for host in hosts)
        free = [host.num_gpus if has_gpus else host.num_cores for host in hosts]
        if processes > max(free):
            raise UserError(
                f"--processes-per-run {processes}: the largest host of the Ray cluster has {max(free)} "
                f"{'GPUs' if has_gpus else 'cores'}. Lower the number."
            )
        slots = at_once or sum(count // processes for count in free)
        num_cores = sum(host.num_cores for host in hosts)
        return LaunchPlan(job, processes, accelerate_config, slots, (), num_cores, sequence_size)
    devices = visible_devices(os.environ)
    if devices and processes > len(devices):
        raise UserError(
            f"--processes-per-run {processes}: this machine has {len(devices)} devices. Lower the number, or set "
            f"{VISIBLE_DEVICES} to an empty string to train on the CPU."
        )
    slots = at_once or (len(devices) // processes if devices else 1)
    return LaunchPlan(job, processes, accelerate_config, slots, devices, usable_cores(), sequence_size)


def visible_devices(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the devices that this command may use, as CUDA_VISIBLE_DEVICES names them, or as torch counts them."""
    named = variables.get(VISIBLE_DEVICES)
    if named is not None:
        names = [name.strip() for name in named.split(",")]
        return tuple(name for name in names if name and name != "-1")
    counted = subprocess.run([sys.executable, "-c", _COUNT_DEVICES], capture_output=True, text=True, check=False)
    count = counted.stdout.strip()
    return tuple(map(str, range(int(count)))) if count.isdigit() else ()


SECONDS_BETWEEN_LINES = 30.0

Progress = tuple[SweepRun, RunHistory, bool]
"""A run, its history, and whether it is stopping."""


class SweepScreen:
    """Lines about runs that end, and the active runs: in a table below on a terminal, else in lines every 30 s."""

    def __init__(self, file: TextIO, *, num_runs: int) -> None:
        self._file = file
        self._num_runs = num_runs
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
        self._num_started += run.name not in self._shown_at  # a run of a lost host is started again
        self._shown_at[run.name] = time.monotonic()
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
        now = time.monotonic()
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


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP inside the context; after a second SIGINT it is urgent."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self.is_urgent = False
        self._handlers_before: dict[int, object] = {}

    def __enter__(self) -> "StopSignals":
        """Install the handlers; an ignored SIGHUP stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                self._handlers_before[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, _: object) -> None:
        self.is_urgent = self.first is not None and number == signal.SIGINT
        self.first = self.first or signal.Signals(number)


@dataclass
class ActiveRun:
    """A run whose launcher is alive, or has ended while other processes of the run still write."""

    run: SweepRun
    process: Any
    slot: int
    reader: HistoryReader
    exit_code: int | None = None
    is_stopping: bool = False


@dataclass
class Scheduler:
    """Trains the runs; `load` returns a run's config, and raises UserError if its job has changed."""

    plan: LaunchPlan
    study: SweepStudy
    screen: SweepScreen
    stop: StopSignals
    load: Callable[[SweepRun], LoadedConfig]
    runs: Iterator[SweepRun]  # of a search: each is chosen when it is to start
    after_run: Callable[[], None]
    prunes: bool = False
    start: Start = start_child
    kill: Callable[[Any], None] = kill_child
    active: list[ActiveRun] = field(default_factory=list)
    _watched_at: float = 0.0
    _num_lost: Counter[str] = field(default_factory=Counter)

    def run_all(self) -> None:
        """Return when all runs have ended, or, after a signal, when the active ones have saved."""
        try:
            while self._fill_slots() or self.active:
                time.sleep(POLL_SECONDS)
                if self.stop.first is not None:
                    self._forward_signal(self.stop.first)
                self._collect_ended()
                if time.monotonic() - self._watched_at >= WATCH_SECONDS:
                    self._watched_at = time.monotonic()
                    self._watch()
        except BaseException:
            for active in self.active:
                active.process.send_signal(signal.SIGTERM)
            raise

    def _fill_slots(self) -> bool:
        """Start runs in the free slots; return whether any was started."""
        has_started = False
        while self.stop.first is None and len(self.active) < self.plan.at_once:
            run = next(self.runs, None)
            if run is None:
                break
            has_started = True
            self._start_run(run)
        return has_started

    def _start_run(self, run: SweepRun) -> None:
        slot = min(set(range(self.plan.at_once)) - {active.slot for active in self.active})
        reader = HistoryReader(run.folder / EVENTS_FILE, keep_steps=True)
        self.study.add(run)
        self.study.start(run, now=time.time())
        try:
            command = self.plan.command(run, self.load(run))
            (run.folder / STOP_FILE).unlink(missing_ok=True)  # of an earlier process that ended before it read the file
            process = self.start(command, log=run.log, environment=self.plan.environment(slot))
        except (UserError, OSError) as error:
            self._end(run, reader, exit_code=2, message=str(error))
            return
        self.active.append(ActiveRun(run, process, slot, reader))
        self.screen.start_run(run)

    def _forward_signal(self, number: signal.Signals) -> None:
        to_stop = [active for active in self.active if not active.is_stopping]
        if to_stop:
            count = f"{len(to_stop)} run{'s' if len(to_stop) > 1 else ''}"
            self.screen.log(
                f"{number.name}: {count} will save and stop; the same command continues. Ctrl-C again kills."
            )
        for active in to_stop:
            active.is_stopping = True
            active.process.send_signal(signal.SIGTERM)
        if self.stop.is_urgent:
            for active in self.active:
                self.kill(active.process)

    def _collect_ended(self) -> None:
        for active in list(self.active):
            if active.exit_code is None:
                active.exit_code = active.process.poll()
            if active.exit_code is None or (is_locked(active.run.folder) and not self.stop.is_urgent):
                continue  # a rank may outlive its launcher while it saves
            self.active.remove(active)
            if active.exit_code == LOST_HOST:
                active.exit_code = -signal.SIGKILL
                self._num_lost[active.run.name] += 1
                if not active.is_stopping and self._num_lost[active.run.name] <= MAX_LOST:
                    self.screen.log(f"{active.run.name}: its host is lost; it is started again, and resumes")
                    self.runs = itertools.chain([active.run], self.runs)
                    continue
            message = printable(end_of_log(active.run.log)) if active.exit_code not in (0, -signal.SIGTERM) else None
            self._end(active.run, active.reader, exit_code=active.exit_code, message=message)

    def _end(self, run: SweepRun, reader: HistoryReader, *, exit_code: int, message: str | None) -> None:
        with suppress(OSError):
            reader.read_new()
        outcome = self.study.end(run, reader.history, exit_code=exit_code, message=message)
        self.screen.end_run(run, outcome, reader.history)
        self.after_run()

    def _watch(self) -> None:
        """Read the new events of the runs, and prune the poor ones of a search."""
        for active in self.active:
            with suppress(OSError):
                active.reader.read_new()
            history = active.reader.history
            if self.prunes and not active.is_stopping and self.study.should_prune(active.run.name, history):
                active.is_stopping = True
                (active.run.folder / STOP_FILE).touch()
                self.screen.log(f"{active.run.name}: pruned at step {history.step}; it will save and stop")
        self.screen.update([(active.run, active.reader.history, active.is_stopping) for active in self.active])


def prepare_data(run: SweepRun, *, number: int, plan: LaunchPlan, stop: StopSignals, start: Start) -> str | None:
    """Run `finetune prepare` with the run's overrides; return the message of a failure, None for a success.

    Data that several runs share is tokenized before they start, so that none waits for the lock of another.
    """
    log = run.sweep_folder / LOGS_FOLDER / f"prepare-{number}.log"
    words = [word for override in run.overrides for word in ("--set", override)]
    command = [sys.executable, "-m", "finetune", "prepare", "--config", str(plan.job), *words]
    process = start(command, log=log, environment={VISIBLE_DEVICES: ""})
    is_signaled = False
    while (code := process.poll()) is None:
        if stop.first is not None and not is_signaled:
            is_signaled = True
            process.send_signal(stop.first)
        time.sleep(POLL_SECONDS)
    if code == 0 or stop.first is not None:
        return None
    return printable(end_of_log(log)) or f"`finetune prepare` ended with exit code {code}; see {log}"
