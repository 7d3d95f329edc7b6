"""Runs a chain: one attempt after the other, each with its faults, and what the judge says of them."""

import contextlib
import random
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from finetune.runtime.supervision.heartbeat import INJECTED, VARIABLE
from tests import launching
from tests.faults import judge
from tests.faults.evidence import LATE, Attempted, Run
from tests.faults.inject import disk, signals
from tests.faults.inject.damage import damage
from tests.faults.inject.moments import StepWatch, wait_until
from tests.faults.job import SHUTDOWN_SECONDS, launch_command, overrides, write_job
from tests.faults.processes import Launched
from tests.faults.schedule import ANY, BETWEEN, Attempt, Chain, Fault, Place

LIMIT_SECONDS = 200.0
"""For an attempt; a hang is found after HANG_SECONDS, and a busy machine is several times slower than an idle one."""

ACTIONS: Mapping[str, str] = {
    **{"kill": "kill", "terminate": "terminate", "hang": "stop", "no space": "no_space", "bit rot": "flip"}
}
"""What a kind is called at a point, see finetune/runtime/supervision/heartbeat.py."""


@dataclass
class Outcome:
    """What became of a chain."""

    chain: Chain
    seconds: float = 0.0
    num_attempts: int = 0
    struck: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # how each attempt ended
    skipped: str = ""  # why it could not be run on this machine


class Ground:
    """Where chains run, and the undisturbed runs with which they are compared, each made once."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def reference(self, chain: Chain, place: Place) -> Run:
        """Return the undisturbed run of the chain's job at a place."""
        kind = "lora" if chain.adapter else "full"
        name = f"reference-{kind}-{place.strategy}-{place.ranks}"
        folder = self.folder / name
        with FileLock(self.folder / f"{name}.lock"):
            if not (folder / "done").exists():
                shutil.rmtree(folder, ignore_errors=True)
                calm = replace(chain, asynchronous=True, workers=0)
                command = launch_command(write_job(folder), place, overrides(calm, place))
                code = launching.run(command, log=folder / "log", timeout_seconds=540)
                assert code == 0, (folder / "log").read_text(errors="replace")[-4000:]
                (folder / "done").touch()
        return Run(folder / "run")

    def run(self, chain: Chain) -> Outcome:
        """Run the chain and judge it; where nothing is wrong, nothing of it is left on the disk."""
        began, outcome = time.monotonic(), Outcome(chain)
        folder = self.folder / f"chain-{chain.seed}-{chain.number}"
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.ExitStack() as stack:
            place = folder / "disk"
            if chain.has_own_disk:
                if not disk.can_mount(folder):
                    outcome.skipped = "no disk can be mounted here"
                    return outcome
                stack.enter_context(disk.own_disk(place))
            job = write_job(place)
            ChainRun(self, chain, job, outcome).run()
            outcome.seconds = time.monotonic() - began
            if outcome.violations and chain.has_own_disk:
                shutil.copytree(place, folder / "copy", dirs_exist_ok=True)
        if not outcome.violations:
            shutil.rmtree(folder, ignore_errors=True)
        return outcome


class ChainRun:
    """One chain while it runs."""

    def __init__(self, ground: Ground, chain: Chain, job: Path, outcome: Outcome) -> None:
        self._ground, self._chain, self._job, self._outcome = ground, chain, job, outcome
        self._run = Run(job.parent / "run")
        self._draw = random.Random(f"damage {chain.seed}/{chain.number}")

    def run(self) -> None:
        """Run the attempts in turn, the last one until it has finished; end at the first violation."""
        for attempt in self._chain.attempts:
            ended = self._attempt(attempt)
            if self._outcome.violations:
                return
            if ended.code == 0:
                break
            if judge.is_refused(ended):
                self._remedy(ended)
        last = Attempt(self._chain.attempts[-1].place, ())
        while ended.code != 0 and judge.is_refused(ended) and not self._outcome.violations:
            ended = self._attempt(last)
            if judge.is_refused(ended) and not self._remedy(ended):
                break
        self._judge_end(last, ended)

    def _judge_end(self, last: Attempt, ended: Attempted) -> None:
        if ended.code != 0 or judge.finish_problem(ended) is not None:
            ended = self._attempt(last)
        reference = self._ground.reference(self._chain, last.place if not self._chain.is_moved else Place("single", 1))
        found = judge.end_violations(self._run, ended, reference=reference, is_exact=not self._chain.is_moved)
        self._outcome.violations += found

    def _attempt(self, attempt: Attempt) -> Attempted:
        struck = self._damage(attempt)
        before, broken = self._run.newest_whole(), self._run.broken()
        num_started = len(self._starts())
        number = self._outcome.num_attempts
        self._outcome.num_attempts += 1
        log = self._ground.folder / f"chain-{self._chain.seed}-{self._chain.number}" / f"attempt-{number}.log"
        began = time.monotonic()
        launched = self._launch(attempt, log)
        try:
            struck += self._inject(attempt, launched)
            code = self._wait(launched)
            orphans = launched.orphans() if code != LATE else [" ".join(p.cmdline()[:6]) for p in launched.family()]
        finally:
            launched.close()
        if self._chain.has_own_disk:
            disk.empty(self._job.parent)
        output = log.read_text(errors="replace")
        struck += [str(fault) for fault in attempt.faults if fault.moment.point and _has_struck(fault, output)]
        self._note_bit_rot(attempt)
        started = self._starts()[num_started:]
        began_at = started[-1] if started else None
        ended = Attempted(
            code=code,
            output=output,
            seconds=time.monotonic() - began,
            step_before=int(before.name[-6:]) if before else 0,
            started_at=began_at,
            status=self._run.status(),
            struck=tuple(struck),
            orphans=tuple(orphans),
            torn=tuple(self._run.torn()),
            trusted=tuple(_trusted(broken, began_at=began_at, output=output)),
        )
        self._outcome.struck += struck
        self._outcome.notes.append(f"{attempt.place}{' cold' if attempt.is_cold else ''}: {judge.summary(ended)}")
        self._outcome.violations += judge.attempt_violations(ended, attempt, log=log)
        return ended

    def _starts(self) -> list[int]:
        return [event["step"] for event in self._run.events() if event["event"] == "RunStarted"]

    def _launch(self, attempt: Attempt, log: Path) -> Launched:
        log.parent.mkdir(parents=True, exist_ok=True)
        points = "; ".join(_at_point(fault) for fault in attempt.faults if fault.moment.point)
        variables = {**{VARIABLE: points, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_SECONDS)}}
        command = launch_command(self._job, attempt.place, overrides(self._chain, attempt.place))
        return Launched(command, log=log, environment=variables, is_cold=attempt.is_cold, ranks=attempt.place.ranks)

    def _damage(self, attempt: Attempt) -> list[str]:
        cache = self._job.parent / "cache"
        between = [fault for fault in attempt.faults if fault.moment == BETWEEN]
        return [str(fault) for fault in between if damage(fault, self._run, cache=cache, draw=self._draw) is not None]

    def _inject(self, attempt: Attempt, launched: Launched) -> list[str]:
        """Inject what comes from outside, in the order of its moments; return what has struck."""
        watch, struck = StepWatch(self._run.folder), []
        outside = [fault for fault in attempt.faults if fault.moment.point is None and fault.moment != BETWEEN]
        for fault in sorted(outside, key=lambda fault: fault.moment.step or 0):
            step = fault.moment.step or 0
            is_there = partial(_has_come, launched, watch, step=step)
            if not wait_until(is_there, has_ended=launched.has_ended, timeout_seconds=LIMIT_SECONDS):
                break
            time.sleep(fault.moment.seconds)
            if self._strike(fault, launched):
                struck.append(str(fault))
        return struck

    def _strike(self, fault: Fault, launched: Launched) -> bool:
        if fault.kind == "full disk":
            disk.fill(self._job.parent, room=int(fault.how))
            return not launched.has_ended()
        if fault.kind == "file limit":
            pids = signals.targets(fault.target, launched)
            with contextlib.suppress(ProcessLookupError):
                for pid in pids:
                    disk.limit_files(pid, size=int(fault.how))
                return bool(pids)
            return False
        return signals.send(fault, launched)

    def _wait(self, launched: Launched) -> int:
        is_over = wait_until(launched.has_ended, has_ended=lambda: False, timeout_seconds=LIMIT_SECONDS)
        code = launched.process.returncode
        return LATE if not is_over or code is None else code

    def _note_bit_rot(self, attempt: Attempt) -> None:
        """Remember which checkpoints a fault has damaged while they were written."""
        for fault in attempt.faults:
            if fault.kind == "bit rot" and fault.moment.step is not None:
                self._run.damaged.add(f"step-{fault.moment.step:06d}")

    def _remedy(self, ended: Attempted) -> bool:
        """Do what the message of a refused start asks for; return False where it asks for nothing that we know."""
        if "only damaged ones" not in ended.output:
            return False
        for path in (self._run.folder / "checkpoints").glob(".bad-*"):
            shutil.rmtree(path)
        self._outcome.notes.append("deleted the damaged checkpoints, as the message says")
        return True


def _has_come(launched: Launched, watch: StepWatch, *, step: int) -> bool:
    """Tell whether the attempt has taken the step; a start counts from when its processes are there."""
    return watch.step() >= step if step else bool(launched.rank_pids())


def _at_point(fault: Fault) -> str:
    words = [str(fault.moment.point)]
    if fault.moment.step is not None:
        words.append(f"step={fault.moment.step}")
    if fault.target != ANY:
        words.append(f"rank={fault.target.removeprefix('rank ')}")
    return " ".join([*words, f"do={ACTIONS[fault.kind]}"])


def _has_struck(fault: Fault, output: str) -> bool:
    return f"{INJECTED}: {ACTIONS[fault.kind]} at {fault.moment.point}" in output


def _trusted(broken: list[str], *, began_at: int | None, output: str) -> list[str]:
    """Return the damaged checkpoints newer than the one that was loaded which the start has passed over silently."""
    newer = [name for name in broken if began_at is not None and int(name[-6:]) > began_at]
    return [name for name in newer if f".bad-{name}" not in output]
