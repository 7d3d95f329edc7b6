"""What a rehearsal says: its phases as they pass, then what was replaced, what was proved and what was not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.commands.printing import print_json
from finetune.commands.rehearse.shrink import Change, shown
from finetune.runtime.text.terminal import printable

UNPROVED = (
    "memory on the real devices (`finetune plan` predicts it)",
    "NCCL, the links between the machines, and how they are launched there",
    "kernels of GPUs: flash attention, compiled and 16-bit arithmetic",
    "speed",
    "convergence: the weights are random",
    "that the real weights load: only names and shapes of their architecture were built",
)


@dataclass
class Rehearsal:
    """What is known so far; prints each phase at once."""

    is_json: bool
    replaced: list[Change] = field(default_factory=list)
    proved: list[tuple[str, str]] = field(default_factory=list)  # phase, evidence
    unproved: list[str] = field(default_factory=lambda: list(UNPROVED))

    def passed(self, phase: str, *evidence: str) -> None:
        """Say that the phase is behind, and with what evidence."""
        self.proved += [(phase, each) for each in evidence]
        self._log(f"rehearse: {phase} ... ok{f' ({evidence[0]})' if evidence else ''}")

    def failed(self, phase: str, message: str, *, log: str | None) -> None:
        """Say which phase failed, with the error of the run and the path of its log."""
        if self.is_json:
            print_json(self._as_json(failed={"phase": phase, "error": message, "log": log}))
            return
        self._log(f"rehearse: {phase} ... FAILED: {message}")
        if log is not None:
            self._log(f"logs of the run: {log}")

    def finish(self) -> None:
        """Print the lists."""
        if self.is_json:
            print_json(self._as_json(failed=None))
            return
        _print_list("replaced or made small", [str(each) for each in self.replaced] or ["nothing"])
        _print_list("proved", [f"{phase}: {text}" for phase, text in self.proved])
        _print_list("not proved", self.unproved)

    def _log(self, text: str) -> None:
        if not self.is_json:
            print(printable(text), flush=True)

    def _as_json(self, *, failed: dict[str, Any] | None) -> dict[str, Any]:
        replaced = [
            {"key": each.key, "was": _plain(each.was), "now": _plain(each.now), "why": each.why}
            for each in self.replaced
        ]
        proved = [{"phase": phase, "evidence": text} for phase, text in self.proved]
        return {
            "ok": failed is None,
            "failed": failed,
            "replaced": replaced,
            "proved": proved,
            "unproved": self.unproved,
        }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | list | dict | None) else shown(value)


def _print_list(title: str, lines: Sequence[str]) -> None:
    print(f"\n{title}")
    for line in _joined_lines(lines):
        print(printable(f"  {line}"))


def _joined_lines(lines: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(lines))
