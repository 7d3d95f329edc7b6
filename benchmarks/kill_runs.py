"""Kill a run that saves at every step at random moments, start it again each time, and compare what comes of it.

    python benchmarks/kill_runs.py [--strategies ddp:2,fsdp2:2,zero3:2] [--kills 30] [--steps 120] [--seed 1]

`kill -9` hits one rank or all of them, at moments spread evenly over the time in which the run makes steps, and some
while it starts. Now and then a byte of the newest checkpoint is flipped before the next start. Checked: every step that
was ever taken has the loss and the samples of the run that was never killed; every start goes on from the newest
checkpoint that is whole and names those it passed over; every launch ends by itself; the last checkpoint has the same
state, bit by bit. Exit code 1 otherwise.
"""

import argparse
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from attempts import LAUNCH_SECONDS, Attempt, Job, state_digest
from rich.console import Console
from rich.table import Table
from tiny_job import LORA, write_job

AT_START = 0.15  # of the kills
DAMAGED_EVERY = 5  # kills
OVERRIDES = ("checkpoint.every_steps=1", "train.microbatch_size=2")
VARIANTS = {"full": (), "lora": (LORA % 0.1,)}
CONTINUES = re.compile(r"continues from (\S+) after step (\d+)")


@dataclass(frozen=True)
class Straight:
    """The run that was never killed."""

    steps: dict[int, tuple[float, str]]  # loss and samples
    state: str
    start_seconds: float  # from the launch to the first step
    step_seconds: float  # from the first step to the last


@dataclass
class Report:
    """What happened under one strategy."""

    place: str
    scopes: Counter[str] = field(default_factory=Counter)
    moments: Counter[str] = field(default_factory=Counter)
    starts_checked: int = 0
    num_damaged: int = 0
    steps_compared: int = 0
    slowest_end: float = 0.0
    finals: list[bool] = field(default_factory=list)  # of each finished run: is its state the straight one's?
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Run every strategy, print the table, return 1 when anything was not as it must be."""
    options = _options()
    reports: list[Report] = []
    with tempfile.TemporaryDirectory(prefix="finetune-kills-") as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        config = write_job(folder)
        overrides = (*OVERRIDES, *VARIANTS[options.variant], f"train.steps={options.steps}")
        try:
            for place in options.strategies.split(","):
                reports.append(Report(place))
                job = Job(config, overrides, place, folder / place.replace(":", "-") / "straight")
                _kill_often(job, reports[-1], kills=options.kills, chance=random.Random(f"{options.seed}/{place}"))
        except KeyboardInterrupt:
            reports[-1].problems.append("interrupted")
    _print_table(reports, kills=options.kills)
    for report in reports:
        for problem in report.problems:
            print(f"{report.place}: {problem}")
    return int(any(report.problems for report in reports))


def _kill_often(job: Job, report: Report, *, kills: int, chance: random.Random) -> None:
    """Kill runs of the job until so many kills are done and the last run has finished."""
    straight = _run_straight(job)
    if straight is None:
        report.problems.append(f"the straight run failed: {job.folder}.log")
        return
    window = 2 * straight.step_seconds / (kills + 1)  # one run takes about all the kills
    while not report.problems and (report.moments.total() < kills or not report.finals):
        life = Job(job.config, job.overrides, job.place, job.folder.with_name(f"run-{len(report.finals)}"))
        for number in range(10 * kills):
            left = kills - report.moments.total()
            is_over = _one_launch(
                life, report, number=number, straight=straight, window=window if left > 0 else None, chance=chance
            )
            if is_over or report.problems:
                break
        report.problems += _wrong_steps(life, report, straight=straight)
        last = max(life.checkpoints(), default=None)
        report.finals.append(last is not None and state_digest(last) == straight.state)
        if not report.finals[-1]:
            report.problems.append(f"{life.folder}: another state at the end than {straight.state}")


def _run_straight(job: Job) -> Straight | None:
    attempt = Attempt(job, log=job.folder.with_suffix(".log"))
    attempt.wait(attempt.has_stepped, seconds=LAUNCH_SECONDS)
    start_seconds = time.monotonic() - attempt.started
    attempt.wait(lambda: False, seconds=LAUNCH_SECONDS)
    attempt.end()
    taken = job.events("StepTaken")
    if not job.events("RunEnded") or not state_digest(max(job.checkpoints())):
        return None
    steps = {event["step"]: (event["loss"], event["samples_sha256"]) for event in taken}
    seconds = taken[-1]["time"] - taken[0]["time"]
    return Straight(steps, state_digest(max(job.checkpoints())), start_seconds, seconds)


def _one_launch(
    job: Job, report: Report, *, number: int, straight: Straight, window: float | None, chance: random.Random
) -> bool:
    """Launch once, kill it unless there is no window, and return whether the run has come to its end."""
    before = job.checkpoints()
    attempt = Attempt(job, log=job.folder.with_name(f"{job.folder.name}-{number:03d}.log"))
    if window is None:
        attempt.wait(lambda: False, seconds=LAUNCH_SECONDS)
    elif chance.random() < AT_START:
        attempt.wait(lambda: False, seconds=chance.uniform(0.1, 0.8) * straight.start_seconds)
        attempt.wait(lambda: bool(attempt.ranks()), seconds=LAUNCH_SECONDS)
    else:
        attempt.wait(attempt.has_stepped, seconds=LAUNCH_SECONDS)
        attempt.wait(lambda: False, seconds=chance.uniform(0.0, window))
    is_killed = window is not None and _kill(attempt, report, chance=chance)
    seconds = attempt.end()
    if seconds is None:
        report.problems.append(f"{attempt.log}: the launch did not end")
    report.slowest_end = max(report.slowest_end, seconds or 0.0)
    report.problems += _wrong_start(attempt, report, before=before)
    if is_killed and report.moments.total() % DAMAGED_EVERY == 0:
        report.num_damaged += _damage(job)
    is_over = bool(job.events("RunEnded"))
    if not (is_killed or is_over):
        report.problems.append(f"{attempt.log}: the launch ended without a kill and without an end")
    return is_over


def _kill(attempt: Attempt, report: Report, *, chance: random.Random) -> bool:
    """Kill one rank or all, unless it is too late; note what was going on."""
    ranks = attempt.ranks()
    if attempt.is_over or not ranks:
        return False
    scope = chance.choice(["one rank", "all ranks"])
    victims = [chance.choice(list(ranks.values()))] if scope == "one rank" else list(ranks.values())
    is_saving, has_stepped = attempt.is_saving(), attempt.has_stepped()
    attempt.kill(victims)
    report.scopes[scope] += 1
    report.moments["save" if is_saving else "step" if has_stepped else "start"] += 1
    print(
        f"{report.place} kill {report.moments.total()}: {scope}, "
        f"after {time.monotonic() - attempt.started:.2f} s, {dict(report.moments)}",
        file=sys.stderr,
        flush=True,
    )
    return True


def _wrong_start(attempt: Attempt, report: Report, *, before: dict[Path, bool]) -> Iterator[str]:
    """Yield what is wrong with where a launch went on, as far as it came to say so."""
    said = attempt.log.read_text(errors="replace")
    newest = max((path for path, whole in before.items() if whole), default=None)
    passed_over = [path for path, whole in before.items() if not whole and (newest is None or path > newest)]
    continued = CONTINUES.search(said)
    if continued is None and not attempt.has_stepped():
        return
    report.starts_checked += 1
    if (continued and Path(continued[1])) != newest:
        yield f"{attempt.log}: went on from {continued and continued[1]}; the newest whole checkpoint was {newest}"
    for path in passed_over:
        if f"skipped {path.name}" not in said:
            yield f"{attempt.log}: did not name {path.name}, which is damaged"


def _wrong_steps(job: Job, report: Report, *, straight: Straight) -> Iterator[str]:
    """Yield every step, of any launch, that was not as in the straight run."""
    for event in job.events("StepTaken"):
        report.steps_compared += 1
        if (event["loss"], event["samples_sha256"]) != straight.steps[event["step"]]:
            yield f"{job.folder}: step {event['step']} gave {event['loss']}, straight {straight.steps[event['step']]}"


def _damage(job: Job) -> int:
    """Flip a byte of the newest checkpoint where there is another one; return the number of damaged checkpoints."""
    whole = [path for path, is_whole in job.checkpoints().items() if is_whole]
    if len(whole) < 2:
        return 0
    largest = max(whole[-1].rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[-1] ^= 1
    largest.write_bytes(content)
    return 1


def _print_table(reports: list[Report], *, kills: int) -> None:
    table = Table(title=f"runs that save at every step, killed {kills} times and started again")
    table.add_column("strategy", no_wrap=True)
    columns = ("kills: one rank", "all ranks", "moments: start", "step", "save", "starts checked", "damaged")
    for column in (*columns, "steps compared", "slowest end s", "final states equal"):
        table.add_column(column, justify="right")
    for each in reports:
        table.add_row(
            each.place,
            *(str(each.scopes[scope]) for scope in ("one rank", "all ranks")),
            *(str(each.moments[moment]) for moment in ("start", "step", "save")),
            str(each.starts_checked),
            str(each.num_damaged),
            str(each.steps_compared),
            f"{each.slowest_end:.1f}",
            f"{sum(each.finals)} of {len(each.finals)}",
        )
    Console(width=150).print(table)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default="ddp:2,fsdp2:2,zero3:2")
    parser.add_argument("--kills", type=int, default=30, help="per strategy")
    parser.add_argument("--steps", type=int, default=120, help="of the run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", choices=list(VARIANTS), default="full")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; unset, a folder that is removed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
