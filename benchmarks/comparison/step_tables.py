"""The tables of the steps: the floor, and three tiers side by side."""

from collections.abc import Mapping, Sequence

from comparison.ratios import TOLERANCE, Measured
from comparison.results import Spread, Table
from comparison.workloads import EQUAL

TIERS: Mapping[str, tuple[str, ...]] = {
    "no trainer": ("floor",),
    "identical math": ("bare", "accelerate", "trainer", "trl equal", "ours equal"),
    "defaults": ("trl default", "ours"),
    "each one's best": ("trainer grouped", "trl packing", "trl grouped", "trl padding-free", "ours tuned"),
}
HEADER = (
    *("tier", "competitor", "ms a step", "non-pad tokens/s", "target tokens/s", "against Trainer (quartiles)"),
    *("ms more than bare", "losses"),
)


def tables(equal: Measured, peaks: Measured, timed: Sequence[Measured]) -> list[Table]:
    """Return a table a workload, those of losses and memory first."""
    return [_losses(equal), _peaks(peaks), *(_table(measured) for measured in timed)]


def summary(measured: Measured) -> str:
    """Return one line: how fast everybody is."""
    speeds = {name: 1 / Spread.of(cost.seconds_per_token).median for name, cost in measured.costs.items()}
    return "  non-pad tokens per CPU-second: " + ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items())


def peak_summary(measured: Measured) -> str:
    """Return one line: how much memory everybody takes."""
    peaks = ", ".join(f"{name} {cost.peak_bytes / 1e6:,.0f}" for name, cost in measured.costs.items())
    return f"  peak resident memory in MB: {peaks}"


def _peaks(measured: Measured) -> Table:
    trainer = measured.costs["trainer"].peak_bytes
    rows = [
        (name, f"{cost.peak_bytes / 1e6:,.0f}", f"{cost.peak_bytes / trainer:.2f}")
        for name, cost in measured.costs.items()
    ]
    header = ("competitor", "MB", "against Trainer")
    return Table("Peak resident memory of a process that has done nothing else", header, rows, _note(measured))


def _losses(equal: Measured) -> Table:
    rows = [
        (name, f"{cost.losses[0]:.6f}", f"{cost.losses[-1]:.6f}", f"{equal.loss_difference(name):.1e}")
        for name, cost in equal.costs.items()
    ]
    header = ("competitor", "first loss", "last loss", "difference from bare at most, relative")
    return Table("Equivalence: mean loss of each of 20 steps in fp32", header, rows, equal.lengths)


def _table(measured: Measured) -> Table:
    rows = [
        (tier if name == there[0] else "", *_row(measured, name))
        for tier, names in TIERS.items()
        if (there := [name for name in names if name in measured.costs])
        for name in there
    ]
    return Table(f"{measured.workload.name}: {measured.workload.title}", HEADER, rows, _note(measured))


def _row(measured: Measured, name: str) -> tuple[str, ...]:
    cost = measured.costs[name]
    seconds = Spread.of(cost.seconds).median
    targets = sum(cost.targets) / sum(cost.seconds)
    more = measured.extra_milliseconds(name, "bare").median if name in EQUAL or name == "ours equal" else None
    return (
        name,
        f"{1000 * seconds:,.1f}",
        f"{1 / Spread.of(cost.seconds_per_token).median:,.0f}",
        f"{targets:,.0f}",
        str(measured.speed(name, "trainer")) if "trainer" in measured.costs else "",
        "" if more is None else f"{more:+.2f}",
        _agreement(measured, name),
    )


def _agreement(measured: Measured, name: str) -> str:
    """Return whether the losses are the bare loop's; some competitors take other samples, or compute in bf16."""
    if name == "floor":
        return "none"
    if name not in EQUAL and name != "ours equal":
        return "other samples" if name != "trl default" else "bf16"
    return "equal" if measured.loss_difference(name) <= TOLERANCE else "differ"


def _note(measured: Measured) -> str:
    sizes, workload = measured.workload.sizes, measured.workload
    return (
        f"Llama of {sizes.layers} layers of {sizes.width}, {sizes.vocabulary:,} words"
        f"{', LoRA' if workload.lora else ''}; {workload.rounds} rounds after {workload.warm_up}; "
        f"seconds are of CPU, at one thread; {measured.lengths}"
    )
