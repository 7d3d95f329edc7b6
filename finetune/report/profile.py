"""Profiles a window of steps; a step outside the window costs only one attribute check."""

import os
import pickle
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.config.sections.report import ProfileSection
from finetune.report.events import Noted, Profiled, Warned
from finetune.report.phases import PhaseClock, PhaseSeconds, phase_seconds, read_trace, spread_over_ranks
from finetune.report.reporter import Reporter
from finetune.runtime import distributed
from finetune.runtime.files import atomic

_QUIET = "6"  # Kineto's level above all that it logs; it would print a line at the start and the end of a trace

Attach = Callable[["StepProfile"], AbstractContextManager[None]]
"""Counts calls of a library as phases while the window is open."""

_NOTHING = nullcontext()


class Profile:
    """Receives the steps of a run and their phases, and profiles nothing. All methods but `phase` are collective."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time counts for the phase."""
        return _NOTHING

    def begin(self, step: int) -> None:
        """Begin training after `step` steps."""

    def end_step(self, step: int) -> None:
        """End a step; `step` steps are done."""

    def end_training(self, step: int) -> None:
        """End training after `step` steps."""


class TraceRecorder:
    """Records a trace, and the memory, until it is stopped."""

    def __init__(self, section: ProfileSection, *, has_cuda: bool) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        kinds = torch.profiler.ProfilerActivity
        self._snapshot: Any = None
        self._takes_snapshot = section.memory and has_cuda
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if has_cuda else [])],
            profile_memory=section.memory and not has_cuda,
            with_stack=section.stacks,
        )
        if self._takes_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        self._profiler.start()

    def stop(self) -> None:
        """Stop recording."""
        self._profiler.stop()
        if self._takes_snapshot:
            self._snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)

    def events(self) -> Any:
        """Return Kineto's events."""
        profiler: Any = self._profiler.profiler
        return profiler.kineto_results.events()

    def write(self, folder: Path, name: str) -> Path:
        """Write the trace, compressed, and torch's snapshot of a GPU's memory; raises OSError."""
        trace = folder / f"{name}.pt.trace.json.gz"
        folder.mkdir(parents=True, exist_ok=True)
        staging = atomic.temporary_path(trace)  # a folder, as torch compresses files named `.gz`
        staging.mkdir()
        try:
            self._profiler.export_chrome_trace(str(staging / trace.name))
            (staging / trace.name).replace(trace)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        if self._snapshot is not None:
            atomic.write_bytes(folder / f"{name}.memory.pickle", pickle.dumps(self._snapshot))
        return trace


@dataclass(frozen=True)
class _Outcome:
    """The measurements of a rank, or the reason why there are none."""

    spent: PhaseSeconds | None
    trace: str
    problem: str | None


class StepProfile(Profile):
    """Profiles the steps of one window and reports `Profiled`; failures are warnings.

    A run that resumes within the window profiles the rest of it; a run that ends within it profiles the steps so far.
    """

    def __init__(
        self,
        section: ProfileSection,
        *,
        folder: Path,
        reporter: Reporter,
        device: torch.device,
        attach: Attach = lambda profile: nullcontext(),
    ) -> None:
        """`folder` is the parent of the window's folder."""
        self._section = section
        self._folder = folder
        self._report = reporter
        self._device = device
        self._attach = attach
        self._clock: PhaseClock | None = None
        self._recorder: TraceRecorder | None = None
        self._stack = ExitStack()
        self._first_step = 0  # of the open window; 0 if none is open
        self._problem: str | None = None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time counts for the phase while the window is open."""
        return _NOTHING if self._clock is None else self._clock.phase(name)

    def begin(self, step: int) -> None:
        """Open the window if it contains the next step; log if it is over."""
        first, last = self._section.start, self._last_step
        if step >= last:
            self._report(Noted(step, f"report.profile: steps {first} to {last} are over; nothing is profiled"))
        self._open_if_due(step)

    def end_step(self, step: int) -> None:
        """Open or close the window if this step begins or ends it. Collective at its end."""
        if self._clock is not None:
            self._clock.begin_step(step + 1) if step < self._last_step else self._close(step)
        elif self._first_step:
            if step >= self._last_step:
                self._close(step)  # collective: it failed to open here, but other ranks opened it
        else:
            self._open_if_due(step)

    def end_training(self, step: int) -> None:
        """Close an open window early. Collective."""
        if self._first_step and step >= self._first_step:
            self._close(step)
        elif self._recorder is not None:  # opened for a step that never came: a running profiler may crash at exit
            self._first_step = 0
            self._stack.close()
            self._clock, recorder, self._recorder = None, self._recorder, None
            recorder.stop()

    @property
    def _last_step(self) -> int:
        return self._section.start + self._section.steps - 1

    def _open_if_due(self, step: int) -> None:
        if not self._section.start - 1 <= step < self._last_step:
            return
        self._first_step = step + 1
        try:
            self._recorder = TraceRecorder(self._section, has_cuda=self._device.type == "cuda")
            clock = PhaseClock(self._device)
            self._stack.enter_context(self._attach(self))
        except Exception as error:  # another profiler may use the device
            self._problem = f"{type(error).__name__}: {error}"
            return
        self._clock, self._began = clock, time.monotonic()
        clock.begin_step(step + 1)

    def _close(self, step: int) -> None:
        """End the window and report it. Collective."""
        first, self._first_step = self._first_step, 0
        outcome = self._measure(first, step)
        outcomes = distributed.gather_objects(outcome)
        for rank, result in enumerate(outcomes):
            if result.problem is not None:
                self._report(Warned(step, f"report.profile: rank {rank}: {result.problem}"))
        ranks = [result.spent for result in outcomes if result.spent is not None]
        if outcome.spent is None or len(ranks) < len(outcomes):
            return
        self._report(
            Profiled(
                step=step,
                first_step=first,
                num_steps=step - first + 1,
                seconds=outcome.spent.seconds,
                wall_seconds=outcome.spent.wall,
                trace=outcome.trace,
                overlapped_seconds=outcome.spent.overlapped,
                ranks=spread_over_ranks(ranks),
            )
        )

    def _measure(self, first: int, last: int) -> _Outcome:
        """Return this rank's measurements, and write its files; not collective, so it may fail."""
        self._stack.close()
        clock, self._clock = self._clock, None
        recorder, self._recorder = self._recorder, None
        if clock is None or recorder is None:
            return _Outcome(None, "", self._problem)
        try:
            changes, wall = clock.stop(), time.monotonic() - self._began
            recorder.stop()
            spent = phase_seconds(changes, read_trace(recorder.events()), wall=wall)
        except Exception as error:
            return _Outcome(None, "", f"{type(error).__name__}: {error}")
        try:
            trace = recorder.write(self._folder / f"steps-{first:06}-{last:06}", f"rank-{distributed.rank()}")
        except Exception as error:  # a full disk
            return _Outcome(spent, "", f"the trace could not be written: {type(error).__name__}: {error}")
        return _Outcome(spent, str(trace), None)
