"""The tables of the steps: three tiers side by side."""

from collections.abc import Mapping, Sequence

from contest.finding import Spread
from contest.measured import Table
from contest.ratios import Played, differing, furthest
from contest.workloads import EQUAL

TIERS: Mapping[str, tuple[str, ...]] = {
    "identical math": ("bare", "accelerate", "trainer", "trl equal", "ours equal"),
    "defaults": ("trl default", "ours"),
    "each one's best": ("trainer grouped", "trl packing", "trl grouped", "trl padding-free", "ours tuned"),
}
HEADER = (
    *("tier", "contestant", "ms a step", "non-pad tokens/s", "target tokens/s", "against Trainer (quartiles)"),
    *("ms more than bare", "losses"),
)


def tables(equal: Played, peaks: Played, all_played: Sequence[Played]) -> list[Table]:
    """Return a table a workload, those of losses and memory first."""
    return [_losses(equal), _peaks(peaks), *(_table(played) for played in all_played)]


def summary(played: Played) -> str:
    """Return one line: how fast everybody is."""
    speeds = {name: 1 / Spread.of(sheet.token_seconds).median for name, sheet in played.sheets.items()}
    return "  non-pad tokens per CPU-second: " + ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items())


def peak_summary(played: Played) -> str:
    """Return one line: how much memory everybody takes."""
    peaks = ", ".join(f"{name} {sheet.peak_bytes / 1e6:,.0f}" for name, sheet in played.sheets.items())
    return f"  peak resident memory in MB: {peaks}"


def _peaks(played: Played) -> Table:
    trainer = played.sheets["trainer"].peak_bytes
    rows = [
        (name, f"{sheet.peak_bytes / 1e6:,.0f}", f"{sheet.peak_bytes / trainer:.2f}")
        for name, sheet in played.sheets.items()
    ]
    header = ("contestant", "MB", "against Trainer")
    return Table("Peak resident memory of a process that has done nothing else", header, rows, _note(played))


def _losses(gate: Played) -> Table:
    rows = [
        (name, f"{sheet.losses[0]:.6f}", f"{sheet.losses[-1]:.6f}", f"{furthest(gate, name):.1e}")
        for name, sheet in gate.sheets.items()
    ]
    header = ("contestant", "first loss", "last loss", "furthest from bare, relative")
    return Table("Equivalence gate: mean loss of each of 20 steps in fp32", header, rows, gate.note)


def _table(played: Played) -> Table:
    rows = [
        (tier if name == there[0] else "", *_row(played, name))
        for tier, names in TIERS.items()
        if (there := [name for name in names if name in played.sheets])
        for name in there
    ]
    return Table(f"{played.workload.name}: {played.workload.title}", HEADER, rows, _note(played))


def _row(played: Played, name: str) -> tuple[str, ...]:
    sheet = played.sheets[name]
    seconds = Spread.of(sheet.seconds).median
    targets = sum(sheet.targets) / sum(sheet.seconds)
    more = played.more_milliseconds(name, "bare").median if name in EQUAL or name == "ours equal" else None
    return (
        name,
        f"{1000 * seconds:,.1f}",
        f"{1 / Spread.of(sheet.token_seconds).median:,.0f}",
        f"{targets:,.0f}",
        str(played.speed(name, "trainer")) if "trainer" in played.sheets else "",
        "" if more is None else f"{more:+.2f}",
        _agreement(played, name),
    )


def _agreement(played: Played, name: str) -> str:
    """Return whether the losses of all steps are the bare loop's; others take other samples, or other numbers."""
    if name not in EQUAL and name != "ours equal":
        return "other samples" if name != "trl default" else "bf16"
    return "differ" if differing(played, among=[name]) else "equal"


def _note(played: Played) -> str:
    sizes, workload = played.workload.sizes, played.workload
    return (
        f"Llama of {sizes.layers} layers of {sizes.width}, {sizes.vocabulary:,} words"
        f"{', LoRA' if workload.lora else ''}; {workload.rounds} rounds after {workload.warm_up}; "
        f"seconds are of CPU, at one thread; {played.note}"
    )
