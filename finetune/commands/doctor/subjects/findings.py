"""Findings of the checks: the problem, its consequence, and the command or key that fixes it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum


class Severity(IntEnum):
    """The consequence of not fixing a finding."""

    MUST_FIX = 0  # a run fails, hangs or computes wrong results
    SHOULD_FIX = 1  # a run is slower or more fragile than necessary
    NOTE = 2


LABELS = {Severity.MUST_FIX: "FIX", Severity.SHOULD_FIX: "SHOULD", Severity.NOTE: "note"}


@dataclass(frozen=True)
class Finding:
    """A problem of a machine, a rank or a launch, with its fix."""

    key: str  # the name of the check, as in docs/how-to/doctor.md
    severity: Severity
    what: str
    why: str
    fix: str
    hosts: tuple[str, ...] = ()  # empty: all hosts


def must_fix(key: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding that makes a run fail."""
    return Finding(key, Severity.MUST_FIX, what, why, fix)


def should_fix(key: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding that makes a run slow or fragile."""
    return Finding(key, Severity.SHOULD_FIX, what, why, fix)


def note(key: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding that is worth knowing."""
    return Finding(key, Severity.NOTE, what, why, fix)


def merge_hosts(findings: Iterable[Finding], *, num_hosts: int) -> list[Finding]:
    """Return each finding once, the most severe first, with the hosts that have it; no hosts if all have it."""
    hosts_by_finding: dict[Finding, list[str]] = {}
    for finding in findings:
        hosts_by_finding.setdefault(replace(finding, hosts=()), []).extend(finding.hosts)
    merged = [
        replace(finding, hosts=() if len(set(hosts)) == num_hosts else tuple(dict.fromkeys(hosts)))
        for finding, hosts in hosts_by_finding.items()
    ]
    return sorted(merged, key=lambda finding: finding.severity)


def format_finding(finding: Finding) -> str:
    """Return the lines that are printed for a finding."""
    where = f" [{', '.join(finding.hosts)}]" if finding.hosts else ""
    return f"{LABELS[finding.severity]}: {finding.what}{where}\n    why: {finding.why}\n    fix: {finding.fix}"


def has_severe(findings: Sequence[Finding]) -> bool:
    """Return whether something must be fixed before a run."""
    return any(finding.severity is Severity.MUST_FIX for finding in findings)
