"""The tables of the steps: losses, memory, and a table for each workload."""

from collections.abc import Sequence

from comparison.ratios import TOLERANCE, Measured
from comparison.results import Spread, Table
from comparison.workloads import EQUAL

HEADER = (
    *("competitor", "ms a step", "non-pad tokens/s", "target tokens/s", "against Trainer (quartiles)"),
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
    rows = [_row(measured, name) for name in measured.costs]
    return Table(f"{measured.workload.name}: {measured.workload.title}", HEADER, rows, _note(measured))


def _row(measured: Measured, name: str) -> tuple[str, ...]:
    """Return the row of a competitor; the losses of some are others: they take other samples, or compute in bf16."""
    cost, is_equal = measured.costs[name], name in EQUAL
    agreement = "equal" if is_equal and measured.loss_difference(name) <= TOLERANCE else "differ"
    return (
        name,
        f"{1000 * Spread.of(cost.seconds).median:,.1f}",
        f"{1 / Spread.of(cost.seconds_per_token).median:,.0f}",
        f"{sum(cost.targets) / sum(cost.seconds):,.0f}",
        str(measured.speed(name, "trainer")) if "trainer" in measured.costs else "",
        f"{measured.extra_milliseconds(name, 'bare').median:+.2f}" if is_equal else "",
        agreement if is_equal else "bf16" if name == "trl default" else "other samples",
    )


def _note(measured: Measured) -> str:
    sizes, workload = measured.workload.sizes, measured.workload
    return (
        f"Llama of {sizes.layers} layers of {sizes.width}, {sizes.vocabulary:,} words"
        f"; {workload.rounds} rounds after {workload.warm_up}; "
        f"seconds are of CPU, at one thread; {measured.lengths}"
    )
