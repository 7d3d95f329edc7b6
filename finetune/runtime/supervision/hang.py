"""The report that every rank writes when the run hangs, and which ranks the others wait for.

hang/rank-00000.txt   the stacks of all its threads
hang/rank-00000.json  the point that it passed last, and for how long it has passed none
"""

import faulthandler
import os
import platform
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from finetune.runtime.files import atomic
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.run_folder import HANG_FOLDER
from finetune.runtime.supervision.faults import POINTS

_IN_A_STEP = ("data", "forward", "backward", "update.before", "update.after")
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/", "torch/cuda/")
"""Code in which a rank is while it waits for the others."""


@dataclass(frozen=True)
class HangReport:
    """Where one rank is."""

    rank: int
    host: str
    pid: int
    point: str
    step: int
    silent_seconds: float
    where: str  # file, line and function of the main thread's innermost frame

    @property
    def is_waiting(self) -> bool:
        """Return whether it is in a collective, waiting for others."""
        return any(code in self.where for code in _WAITING)

    @property
    def place(self) -> tuple[int, int, int]:
        """Return how far it is: what belongs to a step comes after the saves and evaluations of the step before."""
        return (self.step, int(self.point in _IN_A_STEP), POINTS.index(self.point) if self.point in POINTS else -1)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (process {self.pid} on {self.host}), {self.silent_seconds:.0f} s after it passed "
            f"`{self.point}` at step {self.step}, in {self.where}"
        )


_REPORT = TypeAdapter(HangReport)


def write_report(folder: Path, *, rank: int, point: str, step: int, silent_seconds: float) -> None:
    """Write the report of this process; `folder` is the run's."""
    path = folder / HANG_FOLDER / f"rank-{rank:05d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    report = HangReport(rank, platform.node(), os.getpid(), point, step, silent_seconds, _main_thread_place())
    atomic.write_json(path.with_suffix(".json"), asdict(report))


def read_reports(folder: Path) -> list[HangReport]:
    """Return the reports that exist and can be read, by rank."""
    found = []
    for path in sorted((folder / HANG_FOLDER).glob("rank-*.json")):
        with suppress(OSError, ValueError):
            found.append(parse_as(_REPORT, read_regular(path)))
    return found


def keep_previous_reports(folder: Path) -> None:
    """Rename the reports of an earlier launch to `hang-before`, in place of those of a still earlier one."""
    older = folder / f"{HANG_FOLDER}-before"
    if (folder / HANG_FOLDER).exists():
        shutil.rmtree(older, ignore_errors=True)
        (folder / HANG_FOLDER).rename(older)


def format_blocking_ranks(reports: Sequence[HangReport], *, world: int) -> str:
    """Return a sentence that names the ranks which the others wait for, as far as that can be determined.

    Those without a report come first, then those that are at an earlier point, then those that are in no collective.
    """
    silent = sorted(set(range(world)) - {report.rank for report in reports})
    if silent:
        return f"No report from {', '.join(f'rank {rank}' for rank in silent)}."
    if world == 1:
        return f"Last seen: {reports[0]}."
    furthest = max(report.place for report in reports)
    late = [report for report in reports if report.place < furthest]
    idle = [report for report in reports if not report.is_waiting]
    if late or len(idle) < world:
        return f"The others wait for {'; and '.join(map(str, late or idle))}."
    return "It cannot be determined which rank the others wait for."


def _main_thread_place() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
