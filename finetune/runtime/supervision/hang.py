"""The report that every rank writes when the run hangs, and the ranks that the others wait for.

hang/rank-00000.txt   the stacks of all its threads
hang/rank-00000.json  its last heartbeat, and the time since then
"""

import ast
import faulthandler
import linecache
import os
import platform
import shutil
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import FrameType

from pydantic import TypeAdapter

from finetune.runtime.files import atomic
from finetune.runtime.files.read import parse_as, read_regular
from finetune.runtime.run_folder import HANG_FOLDER
from finetune.runtime.supervision.faults import POINTS

_IN_A_STEP = ("data", "forward", "backward", "update.before", "update.after")
_WAITING = ("torch/distributed/", "torch/autograd/graph.py", "deepspeed/comm/")
"""Code in which a rank waits for the others."""

_WAIT = "wait"  # for a collective that was started before

_AT_DEVICE = ("torch/cuda/", "torch/accelerator/")
_READS_DEVICE = frozenset(
    {"tolist", "item", "cpu", "to", "copy_", "numpy", "nonzero", "synchronize", "float", "int", "bool"}
)
"""Calls in which a rank waits for its device, whose queue may have a collective that waits for the others."""


@dataclass(frozen=True)
class HangReport:
    """The state of one rank."""

    rank: int
    host: str
    pid: int
    point: str
    step: int
    silent_seconds: float
    where: str  # file, line and function of the main thread's innermost frame
    called: str = ""  # the function without a frame, such as `tolist`, that it has called

    @property
    def is_waiting(self) -> bool:
        """Return whether the rank waits for others in a collective, or for its device, which may run one."""
        return self.waits_for_device or self._is_in_collective

    @property
    def waits_for_device(self) -> bool:
        """Return whether the rank waits for its device, which may run a collective or a slow kernel."""
        is_torch_cuda = any(code in self.where for code in _AT_DEVICE)
        return is_torch_cuda or (self.called in _READS_DEVICE and not self._is_in_collective)

    @property
    def _is_in_collective(self) -> bool:
        return self.called == _WAIT or any(code in self.where for code in _WAITING)

    @property
    def progress(self) -> tuple[int, int, int]:
        """Return a sort key of the progress: a step follows the saves and evaluations after the previous one."""
        return (self.step, int(self.point in _IN_A_STEP), POINTS.index(self.point) if self.point in POINTS else -1)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (process {self.pid} on {self.host}), {self.silent_seconds:.0f} s after it passed "
            f"`{self.point}` at step {self.step}, in {self.where}" + (f", calling {self.called}" if self.called else "")
        )


_REPORT = TypeAdapter(HangReport)


def write_report(folder: Path, *, rank: int, point: str, step: int, silent_seconds: float) -> None:
    """Write the report of this process; `folder` is the run's."""
    path = folder / HANG_FOLDER / f"rank-{rank:05d}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    where, called = "nowhere", ""
    if frame is not None:
        where, called = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}", _called(frame)
    report = HangReport(rank, platform.node(), os.getpid(), point, step, silent_seconds, where, called)
    atomic.write_json(path.with_suffix(".json"), asdict(report))


def read_reports(folder: Path) -> list[HangReport]:
    """Return the reports that exist and can be read, by rank."""
    reports = []
    for path in sorted((folder / HANG_FOLDER).glob("rank-*.json")):
        with suppress(OSError, ValueError):
            reports.append(parse_as(_REPORT, read_regular(path)))
    return reports


def keep_previous_reports(folder: Path) -> None:
    """Rename the reports of the previous launch to `hang-before`, replacing older ones."""
    older = folder / f"{HANG_FOLDER}-before"
    if (folder / HANG_FOLDER).exists():
        shutil.rmtree(older, ignore_errors=True)
        (folder / HANG_FOLDER).rename(older)


def format_blocking_ranks(reports: Sequence[HangReport], *, world: int) -> str:
    """Return a sentence that names the ranks that the others wait for, if they can be determined.

    These are the ranks without a report, else those at an earlier point, else those outside of collectives. A rank that
    waits for its device is late because of others, so it is not named.
    """
    silent = sorted(set(range(world)) - {report.rank for report in reports})
    if silent:
        return f"No report from {', '.join(f'rank {rank}' for rank in silent)}."
    if world == 1:
        return f"Last seen: {reports[0]}."
    furthest = max(report.progress for report in reports)
    late = [report for report in reports if report.progress < furthest and not report.waits_for_device]
    idle = [report for report in reports if not report.is_waiting]
    if named := late or (idle if len(idle) < world else []):
        return f"The others wait for {'; and '.join(map(str, named))}."
    return "It cannot be determined which rank the others wait for."


def _called(frame: FrameType) -> str:
    """Return the name of the function that a frame's current instruction calls; empty if it does not call one.

    Of `losses.sum().tolist()`, executed up to its second call, that is `tolist`.
    """
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    if position is None or None in position:
        return ""
    first, last, start, end = (int(number or 0) for number in position)
    lines = [linecache.getline(frame.f_code.co_filename, number).encode() for number in range(first, last + 1)]
    if not all(lines):
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    with suppress(SyntaxError, ValueError):
        called = ast.parse(b"".join(lines).strip().decode(errors="replace"), mode="eval").body
        if isinstance(called, ast.Call):
            return getattr(called.func, "attr", getattr(called.func, "id", ""))
    return ""
