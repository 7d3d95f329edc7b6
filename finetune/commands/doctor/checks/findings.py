"""What the checks find: what is wrong, why it matters, and the command or key that fixes it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """How much a finding matters."""

    MUST_FIX = 0  # a run fails, hangs or computes something wrong
    SHOULD_FIX = 1  # a run is slower or more fragile than it need be
    NOTE = 2


LABELS = {Severity.MUST_FIX: "FIX", Severity.SHOULD_FIX: "SHOULD", Severity.NOTE: "note"}


@dataclass(frozen=True)
class Finding:
    """One thing to know, with its fix."""

    key: str  # the name of the check, as in docs/doctor.md
    severity: Severity
    what: str
    why: str
    fix: str
    hosts: tuple[str, ...] = ()  # empty: of all of them


def must_fix(key: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding without whose fix a run fails."""
    return Finding(key, Severity.MUST_FIX, what, why, fix)


def should_fix(key: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding without whose fix a run is slow or fragile."""
    return Finding(key, Severity.SHOULD_FIX, what, why, fix)


def note(key: str, what: str, *, why: str, fix: str) -> Finding:
    """Return a finding that is good to know."""
    return Finding(key, Severity.NOTE, what, why, fix)


def merge_hosts(found: Iterable[Finding], *, num_hosts: int) -> list[Finding]:
    """Return each finding once, the most severe first, with the hosts that have it; none where all have it."""
    merged: dict[Finding, list[str]] = {}
    for each in found:
        merged.setdefault(replace(each, hosts=()), []).extend(each.hosts)
    findings = [
        replace(each, hosts=() if len(set(hosts)) == num_hosts else tuple(dict.fromkeys(hosts)))
        for each, hosts in merged.items()
    ]
    return sorted(findings, key=lambda each: each.severity)


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """Return the finding as plain values."""
    return asdict(finding) | {"severity": finding.severity.name.lower()}


def format_finding(finding: Finding) -> str:
    """Return the lines that are printed."""
    where = f" [{', '.join(finding.hosts)}]" if finding.hosts else ""
    return f"{LABELS[finding.severity]}: {finding.what}{where}\n    why: {finding.why}\n    fix: {finding.fix}"


def has_severe(findings: Sequence[Finding]) -> bool:
    """Return whether something must be fixed before a run."""
    return any(each.severity is Severity.MUST_FIX for each in findings)
