"""Which faults befall a run, drawn from a seed: a chain is one run, its attempts, and what goes wrong in each.

Nothing here touches a process or a file. The same seed and number give the same chain, on every machine.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

STEPS, SAVE_EVERY, EVALUATE_EVERY = 30, 3, 10

SAVE_STEPS = range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)
EVALUATION_STEPS = range(EVALUATE_EVERY, STEPS + 1, EVALUATE_EVERY)


@dataclass(frozen=True)
class Place:
    """Where an attempt runs."""

    strategy: str  # the name of an accelerate config; `single`: one process without a launcher
    ranks: int

    def __str__(self) -> str:
        return self.strategy if self.ranks == 1 else f"{self.strategy}:{self.ranks}"


PLACES = (
    Place("single", 1),
    *(Place(strategy, ranks) for ranks in (2, 3, 4) for strategy in ("ddp", "fsdp2", "zero2", "zero3")),
    Place("tensor_parallel", 2),
)

ALL, ANY, LAUNCHER = "all ranks", "any rank", "the launcher"


@dataclass(frozen=True)
class Moment:
    """When a fault strikes: at a point of the run, or so many seconds after a step, after the launch, or in between."""

    point: str | None = None  # one of faults.POINTS
    step: int | None = None  # None at a point: the first time it is passed
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.point is not None:
            return f"at {self.point}" + (f" of step {self.step}" if self.step is not None else "")
        if self.step is None:
            return "before the attempt"
        return f"{self.seconds:.3f} s after " + (f"step {self.step}" if self.step else "the launch")


BETWEEN = Moment()
"""While nothing runs."""

Kind = Literal[
    *("kill", "terminate", "hang", "pause", "slow", "no space", "bit rot", "full disk", "file limit", "damage"),
]

ENDING = frozenset({"kill", "terminate", "hang"})
"""Kinds after which an attempt has ended; the others it may survive."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once."""

    kind: Kind
    moment: Moment
    target: str = ""  # `rank 1`, `all ranks`, `the launcher`, or the file that is damaged
    how: str = ""  # of damage: flip, truncate, delete ...; of a full disk: the bytes that are left
    is_spare: bool = False  # strikes only where the one before it has missed: a point was never passed

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.how, self.target, str(self.moment))))


@dataclass(frozen=True)
class Attempt:
    """A launch, and the faults that befall it, in the order in which they strike."""

    place: Place
    faults: tuple[Fault, ...]
    is_cold: bool = False  # launched in fresh interpreters, as users do; else forked, which is quick


@dataclass(frozen=True)
class Chain:
    """One run: its attempts, of which the last is left in peace."""

    seed: int
    number: int
    adapter: bool  # LoRA with dropout; else all weights
    asynchronous: bool
    workers: int  # processes that load data, per rank
    attempts: tuple[Attempt, ...]
    has_own_disk: bool = False  # so that it can be full

    @property
    def faults(self) -> list[Fault]:
        """Return all of them but the spare ones."""
        return [fault for attempt in self.attempts for fault in attempt.faults if not fault.is_spare]

    @property
    def is_moved(self) -> bool:
        """Tell whether two attempts have different places."""
        return len({attempt.place for attempt in self.attempts}) > 1

    @property
    def command(self) -> str:
        """Return what runs this chain alone."""
        return f"python -m tests.faults --seed {self.seed} --only {self.number}"


def chains(seed: int) -> Iterator[Chain]:
    """Yield the chains of a seed, without end."""
    number = 0
    while True:
        yield draw_chain(seed, number)
        number += 1


def draw_chain(seed: int, number: int) -> Chain:
    """Return the chain of that number. A third are moved; one in six runs on its own disk.

    Dropout masks depend on the number of ranks, so that moved chains train all weights.
    """
    draw = random.Random(f"{seed}/{number}")
    is_moved = number % 3 == 2
    has_own_disk = number % 6 == 3
    num_attempts = draw.randint(3, 5)
    first = PLACES[(number * 5) % len(PLACES)]
    places = [first] * (num_attempts + 1)
    if is_moved:
        places = [first, *draw.sample([place for place in PLACES if place != first], num_attempts)]
    attempts = [
        _attempt(place, _faults(draw, place, index, num_attempts, has_own_disk), is_cold=(3 * number + index) % 5 == 0)
        for index, place in enumerate(places[:-1])
    ]
    return Chain(
        seed=seed,
        number=number,
        adapter=not is_moved and (number % 4 == 0 or draw.random() < 0.25),
        asynchronous=draw.random() < 0.7,
        workers=int(draw.random() < 0.25),
        attempts=(*attempts, Attempt(places[-1], _last_damage(draw), is_cold=(3 * number + num_attempts) % 5 == 0)),
        has_own_disk=has_own_disk,
    )


def _attempt(place: Place, faults: tuple[Fault, ...], *, is_cold: bool) -> Attempt:
    """Return the attempt; the start of fresh interpreters takes four times as long, and is hit as often."""
    if is_cold:
        faults = tuple(_later(fault) if fault.moment.step == 0 else fault for fault in faults)
    return Attempt(place, faults, is_cold)


def _later(fault: Fault) -> Fault:
    return replace(fault, moment=replace(fault.moment, seconds=4 * fault.moment.seconds))


def _faults(draw: random.Random, place: Place, index: int, num_attempts: int, has_own_disk: bool) -> tuple[Fault, ...]:
    """Return what befalls an attempt: something between, something that it survives, and how it ends."""
    begin, end = (round(STEPS * part / num_attempts) for part in (index, index + 1))
    steps = range(begin + 1, end - 1)
    found = [_damage(draw)] if index and draw.random() < 0.3 else []
    is_last = index == num_attempts - 1
    spare = () if is_last else (Fault("kill", Moment(step=end), ALL, is_spare=True),)
    if has_own_disk and draw.random() < 0.6:
        return (*found, _disk_fault(draw, place, steps), *spare)
    ending = _ending(draw, place, steps, is_first=index == 0, is_last=is_last)
    if ending.moment.step and draw.random() < 0.4:
        found.append(_survivable(draw, place, steps))
    return (*found, ending, *(spare if ending.moment.point else ()))


def _ending(draw: random.Random, place: Place, steps: range, *, is_first: bool, is_last: bool) -> Fault:
    kind: Kind = draw.choices(("kill", "terminate", "hang"), (60, 34, 6 if place.ranks > 1 else 0))[0]
    rank = draw.randrange(place.ranks)
    if draw.random() < 0.55:
        start = LOAD_POINTS if not is_first else PREPARE_POINTS if kind != "hang" else ()
        point = draw.choice(_points(start, is_last=is_last, step=steps.stop))
        moment, only = _moment_at(draw, point, steps)
        return Fault(kind, moment, ANY if point in PREPARE_POINTS else f"rank {rank if only is None else only}")
    if kind == "hang":  # until the ranks have met, nobody knows whether one that is silent still prepares its data
        return Fault(kind, Moment(step=draw.choice(steps), seconds=0.01), f"rank {rank}")
    moment = _moment_after(draw, steps)
    targets = [f"rank {rank}", LAUNCHER, *([ALL] if kind == "kill" else [])]
    return Fault(kind, moment, draw.choice(targets if place.ranks > 1 else targets[:1]))


STEP_POINTS = ("data", "forward", "backward", "update.before", "update.after")
SAVE_POINTS = ("save.begin", "save.copied", "save.write", "save.written", "save.manifest", "save.rename", "save.done")
LOAD_POINTS = ("load.verify", "load.begin", "load.read", "load.done")
PRUNE_POINTS = ("prune.rename", "prune.delete")
EXPORT_POINTS = ("export.begin", "export.write", "export.done")
PREPARE_POINTS = ("prepare.write", "prepare.finish", "prepare.done")

ON_RANK_0 = frozenset({*PRUNE_POINTS, *EXPORT_POINTS, "save.manifest", "save.rename"})
"""Points that no other rank passes. What prepares the data is whichever rank comes first."""


def _points(start: tuple[str, ...], *, is_last: bool, step: int) -> tuple[str, ...]:
    """Return what can be passed: by the start, on the way, and at the end by an export."""
    pruned = PRUNE_POINTS if step > 4 * SAVE_EVERY else ()
    export = 2 * EXPORT_POINTS if is_last else ()
    return (*STEP_POINTS, *SAVE_POINTS, "evaluate", *export, *start, *pruned)


def _moment_at(draw: random.Random, point: str, steps: range) -> tuple[Moment, int | None]:
    """Return when it strikes, and the one rank that passes it; None: any does."""
    only = 0 if point in ON_RANK_0 else None
    if point in STEP_POINTS:
        return Moment(point, draw.choice(steps)), only
    if point in SAVE_POINTS:
        return Moment(point, draw.choice([each for each in SAVE_STEPS if each >= steps.start][:2])), only
    if point == "evaluate":
        return Moment(point, next(each for each in EVALUATION_STEPS if each >= steps.start)), only
    return Moment(point), only


def _moment_after(draw: random.Random, steps: range) -> Moment:
    """Return a moment that is no point: while the run starts, or some time after a step was taken."""
    if draw.random() < 0.3:
        return Moment(step=0, seconds=round(draw.uniform(0.02, 2.0), 2))
    return Moment(step=draw.choice(steps), seconds=round(draw.uniform(0.0, 0.03), 3))


def _survivable(draw: random.Random, place: Place, steps: range) -> Fault:
    rank = f"rank {draw.randrange(place.ranks)}"
    kind: Kind = draw.choices(("pause", "slow", "no space", "bit rot"), (30, 30, 25, 15))[0]
    if kind in ("no space", "bit rot"):
        point = "save.done" if kind == "bit rot" else draw.choice(("save.begin", "save.write", "save.rename"))
        moment, only = _moment_at(draw, point, steps)
        return Fault(kind, moment, "rank 0" if only == 0 or kind == "bit rot" else rank)
    return Fault(kind, _moment_after(draw, steps[: len(steps) // 2 + 1]), rank)


FILES = (
    *("manifest.json", "index.json", "progress.json", "scalars.json", "model", "optimizer"),
    *("token cache", "events.jsonl", "status.json", "inputs", "environment.json"),
)
"""What is damaged while nothing runs; the first six belong to the newest checkpoint."""

MANNERS = ("flip", "truncate", "delete", "empty", "garbage")


def _damage(draw: random.Random) -> Fault:
    name = draw.choices(FILES, (2, 2, 2, 1, 3, 3, 3, 1, 1, 1, 1))[0]
    if name == "events.jsonl":  # a line that a killed process has not finished
        return Fault("damage", BETWEEN, name, "half a line")
    return Fault("damage", BETWEEN, name, draw.choice(MANNERS))


def _last_damage(draw: random.Random) -> tuple[Fault, ...]:
    return (_damage(draw),) if draw.random() < 0.25 else ()


def _disk_fault(draw: random.Random, place: Place, steps: range) -> Fault:
    if draw.random() < 0.3:
        return Fault("file limit", _moment_after(draw, steps), f"rank {draw.randrange(place.ranks)}", "4096")
    room = draw.choice((0, 0, 4096, 100_000, 17 << 20))
    return Fault("full disk", _moment_after(draw, steps), "", str(room))


def chains_with(seed: int, num_faults: int) -> list[Chain]:
    """Return the first chains that have so many faults together."""
    found: list[Chain] = []
    for chain in chains(seed):
        if sum(len(each.faults) for each in found) >= num_faults:
            return found
        found.append(chain)
    raise AssertionError("there is no end of them")
