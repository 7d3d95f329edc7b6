"""The shared parts of `doctor`: findings, and programs and gatherers that run with a time limit."""

import string
import subprocess
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from importlib import resources
from typing import Any

from finetune.runtime.resources import format_size


def run_tool(command: Sequence[str], *, seconds: float = 10.0) -> str:
    """Return the output of a program; raises OSError if it is missing, fails or takes too long."""
    name = " ".join(command[:3])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except FileNotFoundError as error:
        raise OSError(f"`{command[0]}` is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"`{name}` did not answer within {seconds:g} s") from error
    if done.returncode != 0:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise OSError(f"`{name}` failed: {lines[0] if lines else f'exit code {done.returncode}'}")
    return done.stdout


def gather_all(gatherers: Mapping[str, Callable[[], Any]], *, seconds: float) -> tuple[dict[str, Any], list[str]]:
    """Run the gatherers concurrently; return their results by name, and the reasons of the failures.

    A gatherer that hangs, as a driver may, stays in a daemon thread, which does not keep the process alive.
    """
    results: dict[str, Any] = {}
    failed: dict[str, str] = {}

    def gather(name: str, function: Callable[[], Any]) -> None:
        try:
            results[name] = function()
        except Exception as error:  # of any library or tool: the others still answer
            failed[name] = f"{name}: {error or type(error).__name__}"

    threads = {
        name: threading.Thread(target=gather, args=(name, function), daemon=True, name=f"gather {name}")
        for name, function in gatherers.items()
    }
    for thread in threads.values():
        thread.start()
    for thread in threads.values():
        thread.join(seconds)
    late = {name: f"{name}: no answer within {seconds:g} s" for name, thread in threads.items() if thread.is_alive()}
    unread = {**failed, **late}
    return {name: value for name, value in results.items() if name not in late}, [*unread.values()]


class Severity(IntEnum):
    """The consequence of not fixing a finding."""

    MUST_FIX = 0  # a run fails, hangs or computes wrong results
    SHOULD_FIX = 1  # a run is slower or more fragile than necessary
    NOTE = 2


LABELS = {Severity.MUST_FIX: "FIX", Severity.SHOULD_FIX: "SHOULD", Severity.NOTE: "note"}


@dataclass(frozen=True)
class Finding:
    """A problem of a machine, a rank or a launch, with its fix."""

    key: str  # the name of the check, as in docs/how-to/before-a-run.md
    severity: Severity
    what: str
    why: str
    fix: str
    hosts: tuple[str, ...] = ()  # empty: all hosts

    def __str__(self) -> str:
        where = f" [{', '.join(self.hosts)}]" if self.hosts else ""
        return f"{LABELS[self.severity]}: {self.what}{where}\n    why: {self.why}\n    fix: {self.fix}"


class _Formatter(string.Formatter):
    """Formats numbers of bytes (`size`) and lists (`list`), too."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "size":
            return format_size(round(value))
        if format_spec == "list":
            return ", ".join(map(str, value))
        return str(super().format_field(value, format_spec))


@cache
def finding_texts() -> Mapping[str, tuple[Severity, Mapping[str, str]]]:
    """Return the severity and the texts of each finding by its name: a key, and a variant after a slash."""
    text = resources.files(__package__).joinpath("findings.toml").read_text(encoding="utf-8")
    groups = tomllib.loads(text)
    return {name: (Severity[severity], row) for severity, rows in groups.items() for name, row in rows.items()}


def finding(name: str, /, *, severity: Severity | None = None, **values: Any) -> Finding:
    """Return the finding of `findings.toml`, filled with the values; its own severity unless another is given."""
    usual, texts = finding_texts()[name]
    what, why, fix = (_Formatter().vformat(texts[part], (), values) for part in ("what", "why", "fix"))
    return Finding(name.partition("/")[0], usual if severity is None else severity, what, why, fix)


def has_severe(findings: Sequence[Finding]) -> bool:
    """Return whether something must be fixed before a run."""
    return any(finding.severity is Severity.MUST_FIX for finding in findings)
