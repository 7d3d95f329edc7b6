"""`sweep.json`: which runs a sweep has, with which values, and how each has ended; enough to continue it after a kill.

What a run has done is in its own folder. Here is what that does not say: names, values, the exit code of a run that
failed before it wrote a status, and whether a search has pruned it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from finetune.commands.sweep.plan.grid import LOGS_FOLDER, RUNS_FOLDER, Values, is_within, point_key
from finetune.config.formatting import truncate
from finetune.errors import UserError
from finetune.runtime.files import atomic
from finetune.runtime.files.read import first_problem, read_regular
from finetune.runtime.text.redact import comparable_config

STATE_FILE, LOCK_FILE = "sweep.json", ".sweep.lock"
VERSION = 1

_OWN_NAMES = (RUNS_FOLDER, LOGS_FOLDER, LOCK_FILE, "sweep.html", "search.journal")


@dataclass(frozen=True)
class RecordedRun:
    """A run that was planned once: its values, and how its last process ended, if one has."""

    name: str
    values: Values
    started: float | None = None  # unix seconds
    exit_code: int | None = None
    message: str | None = None  # what a process that failed has printed at last
    is_pruned: bool = False


@dataclass(frozen=True)
class SweepState:
    """All that a sweep remembers; `facts` are the keys of its job that must not change."""

    job: str
    facts: Mapping[str, str] = field(default_factory=dict)
    swept: tuple[str, ...] = ()
    runs: Mapping[str, RecordedRun] = field(default_factory=dict)  # by name

    def names(self) -> dict[str, str]:
        """Return the name of each run by its point."""
        return {point_key(run.values): run.name for run in self.runs.values()}

    def with_run(self, run: RecordedRun) -> "SweepState":
        """Return the state with this run added or replaced."""
        return replace(self, runs={**self.runs, run.name: run})


@with_config(ConfigDict(strict=True, extra="forbid"))
class _StoredRun(TypedDict):
    name: str
    values: dict[str, Any]
    started: float | None
    exit_code: int | None
    message: str | None
    is_pruned: bool


@with_config(ConfigDict(strict=True, extra="forbid"))
class _Stored(TypedDict):
    version: int
    job: str
    facts: dict[str, str]
    swept: list[str]
    runs: list[_StoredRun]


_STORED: TypeAdapter[Any] = TypeAdapter(_Stored)


def read_state(folder: Path) -> SweepState | None:
    """Return what the sweep in the folder remembers; None where there is none yet.

    Raises UserError for a damaged file, and for a folder that holds something else than a sweep.
    """
    path = folder / STATE_FILE
    try:
        stored = _STORED.validate_json(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        _require_sweep_folder(folder)
        return None
    except (OSError, ValueError) as error:
        fault = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise UserError(
            f"{path}: the file is damaged: {fault}. Delete it: the same command finds the runs again by their names."
        ) from error
    if stored["version"] != VERSION:
        raise UserError(
            f"{path}: was written by another version of finetune (its version is {stored['version']}, and {VERSION} "
            "is read here). Continue the sweep with that version, or choose another --folder."
        )
    runs = {each["name"]: RecordedRun(**each) for each in stored["runs"]}
    return SweepState(stored["job"], stored["facts"], tuple(stored["swept"]), runs)


def write_state(folder: Path, state: SweepState) -> None:
    """Write what the sweep remembers; raises OSError."""
    runs = [{**asdict(run), "values": comparable_config(run.values)} for run in state.runs.values()]
    stored = {"version": VERSION, "job": state.job, "facts": dict(state.facts), "swept": list(state.swept)}
    atomic.write_json(folder / STATE_FILE, {**stored, "runs": runs}, exact=True)


def _require_sweep_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--folder: {folder} is not a folder. Choose another.")
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    foreign = [name for name in names if name not in _OWN_NAMES and not name.startswith((".", "prepare"))]
    if foreign:
        raise UserError(
            f"--folder: {folder} is not the folder of a sweep: it has `{truncate(foreign[0])}` and no {STATE_FILE}. "
            "Choose a new folder, or that of the sweep to continue."
        )


def require_same_job(state: SweepState, facts: Mapping[str, str], *, swept: frozenset[str], folder: Path) -> None:
    """Raise UserError that names each key of the job which has changed since the sweep was started."""
    varied = swept | frozenset(state.swept)
    before, now = (
        {key: text for key, text in each.items() if not is_within(key, varied)} for each in (state.facts, facts)
    )
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if keys:
        lines = [f"  {key}: {_shown(before.get(key))} then, {_shown(now.get(key))} now" for key in keys]
        raise UserError(
            f"{folder}: this sweep was started with another job:\n" + "\n".join(lines) + "\n"
            "Restore the values to continue it, sweep the key with --set, or choose another --folder."
        )


def _shown(text: str | None) -> str:
    return "not set" if text is None else f"`{truncate(text)}`"


@contextmanager
def lock_sweep(folder: Path) -> Iterator[None]:
    """Hold the sweep's folder, which is made; raises UserError where another sweep holds it."""
    lock = FileLock(folder / LOCK_FILE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"--folder: another `finetune sweep` is running in {folder}. Wait for it, or choose another folder."
        ) from None
    except OSError as error:
        why = error.strerror or error
        raise UserError(f"--folder: {folder} cannot be written: {why}. Choose another folder.") from error
    try:
        yield
    finally:
        lock.release()
