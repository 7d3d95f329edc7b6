"""The report of a rehearsal: its phases as they pass, then lists of changes, verified and unverified points."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from finetune.commands.printing import print_json
from finetune.runtime.text.terminal import printable

UNVERIFIED = (
    "memory on the real devices (`finetune plan` predicts it)",
    "NCCL, the links between the machines, and the launch of processes there",
    "GPU kernels: flash attention, compiled and 16-bit arithmetic",
    "speed",
    "convergence: the weights are random",
    "that the real weights load: only names and shapes of their architecture were built",
    "what was replaced or reduced",
)


@dataclass(frozen=True)
class Change:
    """A value that differs in the rehearsal, with the reason."""

    key: str
    was: Any
    now: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.was)} -> {_shown(self.now)} ({self.why})"


def _shown(value: Any) -> str:
    """Return the value on one line, truncated if it is long."""
    if isinstance(value, list) and len(value) > 3 and isinstance(value[0], str):
        return f"{', '.join(value[:2])}, ... ({len(value)} names)"
    text = "unset" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


@dataclass
class Rehearsal:
    """The results so far; each phase is printed when it ends."""

    is_json: bool
    replaced: list[Change] = field(default_factory=list)
    verified: list[tuple[str, str]] = field(default_factory=list)  # phase, evidence

    def passed(self, phase: str, *evidence: str) -> None:
        """Report that the phase passed, with its evidence."""
        self.verified += [(phase, line) for line in evidence]
        self._log(f"rehearse: {phase} ... ok{f' ({evidence[0]})' if evidence else ''}")

    def failed(self, phase: str, message: str, *, log: str | None) -> None:
        """Report which phase failed, with the error of the run and the path of its log."""
        if self.is_json:
            self._print_json(failed={"phase": phase, "error": message, "log": log})
            return
        self._log(f"rehearse: {phase} ... FAILED: {message}")
        if log is not None:
            self._log(f"logs of the run: {log}")

    def finish(self) -> None:
        """Print the lists."""
        if self.is_json:
            self._print_json(failed=None)
            return
        _print_list("replaced or reduced", map(str, self.replaced))
        _print_list("verified", (f"{phase}: {text}" for phase, text in self.verified))
        _print_list("not verified", UNVERIFIED)

    def _log(self, text: str) -> None:
        if not self.is_json:
            print(printable(text), flush=True)

    def _print_json(self, *, failed: dict[str, Any] | None) -> None:
        replaced = [asdict(change) for change in self.replaced]
        verified = [{"phase": phase, "evidence": text} for phase, text in self.verified]
        lists = {"replaced": replaced, "proved": verified, "unproved": UNVERIFIED}
        print_json({"ok": failed is None, "failed": failed, **lists}, default=_shown)


def _print_list(title: str, lines: Iterable[str]) -> None:
    print(f"\n{title}")
    for line in list(dict.fromkeys(lines)) or ["nothing"]:
        print(printable(f"  {line}"))
