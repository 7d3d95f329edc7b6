"""What differs between the ranks of a launch, and must not."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

from finetune.commands.doctor.checks.findings import Finding, must_fix, note, should_fix
from finetune.commands.doctor.facts.launch import Facts, RankFacts

MAX_CLOCK_SECONDS = 1.0
MAX_LATE_SECONDS = 10.0
_SLOW_RANK = 0.7
"""Of the median speed: below that, a rank holds up the others."""

_MUST_AGREE = ("finetune", "torch", "accelerate", "transformers", "deepspeed", "peft")


def check_ranks(facts: Facts) -> Iterator[Finding]:
    """Yield the differences between ranks."""
    if len(facts.ranks) < 2:
        return
    yield from _versions(facts.ranks)
    yield from _clocks(facts.ranks)
    yield from _devices(facts.ranks)
    yield from _arrival(facts.ranks)
    yield from _speed(facts.ranks)


def _versions(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    packages = {name for rank in ranks for name in rank.packages}
    found: Mapping[str, Callable[[RankFacts], Any]] = {
        "python": lambda rank: rank.python.rpartition(".")[0],
        "CUDA of torch": lambda rank: rank.torch_cuda,
        "NCCL": lambda rank: rank.nccl,
    }
    for name in sorted(packages):
        values = {rank.rank: rank.packages.get(name, "missing") for rank in ranks}
        if len(set(values.values())) > 1:
            finding = must_fix if name in _MUST_AGREE else should_fix
            yield finding(
                "versions",
                f"{name} differs between ranks: {_by_value(values)}",
                why="ranks then call different collectives, or compute different numbers: a hang, or a wrong loss",
                fix=f"pip install {name}=={_majority(values)}   # where it differs",
            )
    for name, read in found.items():
        values = {rank.rank: str(read(rank)) for rank in ranks}
        if len(set(values.values())) > 1:
            yield must_fix(
                "versions",
                f"{name} differs between ranks: {_by_value(values)}",
                why="NCCL refuses or hangs with another version; other builds of torch compute other numbers",
                fix="use the same image or the same lock file on all machines",
            )


def _clocks(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    offsets = {rank.hostname: rank.clock_offset_seconds for rank in ranks}
    away = {host: offset for host, offset in offsets.items() if abs(offset) > MAX_CLOCK_SECONDS}
    if away:
        yield should_fix(
            "clock",
            "clocks differ from rank 0's: " + ", ".join(f"{host} by {offset:+.1f} s" for host, offset in away.items()),
            why="locks and leftovers of killed runs are judged by their age; logs cannot be compared",
            fix="sudo timedatectl set-ntp true   # or: sudo chronyc makestep",
        )


def _devices(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    values = {rank.rank: rank.device for rank in ranks}
    on_cpu = [rank for rank, device in values.items() if device == "cpu"]
    if len(set(values.values())) < 2:
        return
    if 0 < len(on_cpu) < len(ranks):
        yield must_fix(
            "rank-without-gpu",
            f"ranks {', '.join(map(str, on_cpu))} have no GPU: {_by_value(values)}",
            why="more processes than GPUs on a machine, or hidden GPUs: NCCL fails",
            fix="lower num_processes, or look at CUDA_VISIBLE_DEVICES and the driver there",
        )
    else:
        yield should_fix(
            "rank-devices",
            f"the ranks have different devices: {_by_value(values)}",
            why="each step waits for the slowest",
            fix="use machines of one kind",
        )


def _arrival(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    late = [rank for rank in ranks if rank.arrived_seconds > MAX_LATE_SECONDS]
    if late:
        yield note(
            "late-rank",
            "late ranks: "
            + ", ".join(f"rank {each.rank} on {each.hostname} by {each.arrived_seconds:.0f} s" for each in late),
            why="a slow disk or a cold page cache: imports take long there, at every start",
            fix="put the environment on a local disk of that machine",
        )


def _speed(ranks: tuple[RankFacts, ...]) -> Iterator[Finding]:
    speeds: dict[str, float] = {}
    for rank in ranks:  # ranks on one CPU take each other's time: the fastest of a machine counts
        place = rank.hostname if rank.device == "cpu" else f"rank {rank.rank} ({rank.hostname})"
        speeds[place] = max(speeds.get(place, 0.0), rank.flops_per_second)
    usual = median(speeds.values())
    for place, speed in speeds.items():
        if speed < _SLOW_RANK * usual:
            yield should_fix(
                "slow-rank",
                f"{place} computes at {speed / usual:.0%} of the others' speed",
                why="each step waits for it",
                fix="look there at throttling, power cap and other processes (`nvidia-smi`, `top`)",
            )


def _by_value(values: Mapping[int, str]) -> str:
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks[value].append(rank)
    return "; ".join(f"{value} on rank {_ranges(numbers)}" for value, numbers in ranks.items())


def _ranges(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:4]))
    return shown + (f" and {len(numbers) - 4} more" if len(numbers) > 4 else "")


def _majority(values: Mapping[int, str]) -> str:
    return Counter(values.values()).most_common(1)[0][0]
