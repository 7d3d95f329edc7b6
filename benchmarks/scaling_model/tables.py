"""The tables of docs/proof/scaling.md and of the terminal."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from finetune.commands.plan.step_time import step_time

from scaling_model.curves import STRATEGIES, WORLDS, Load, Spot, curve, largest_that_pays
from scaling_model.machines import Machine, usual
from scaling_model.models import BY_NAME, LLAMA_8B, LLAMA_70B, LLAMA_405B, Model, fused
from scaling_model.published import RELATIVE, Compared, Series, compare, fitted_noise
from scaling_model.series import PLACES, SERIES, counted, fitted

WEAK = Load(samples=1)
STRONG = Load(samples=4, global_batch=1024)
LEAST = (0.8, 0.5)


@dataclass(frozen=True)
class Table:
    """Rows of text under their heads."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """Return the table as a page has it."""
        lines = [self.heads, tuple("---" for _ in self.heads), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def records(self) -> list[dict[str, str]]:
        """Return each row by its heads."""
        return [dict(zip(self.heads, row, strict=True)) for row in self.rows]

    def text(self) -> str:
        """Return the table with its columns below each other."""
        lines = [self.heads, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.heads))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


def published_table() -> Table:
    """Return every published run beside the model, with the errors of level and change."""
    heads = ("source", "model", "strategy, GPUs", "length x samples", "measured", "modeled", "level", "change", "use")
    return Table(heads, [_published_row(each) for series in SERIES for each in compare(series)])


def errors_table() -> Table:
    """Return the errors of the changes by source: how many, the median and the largest without a sign."""
    rows = []
    groups: Mapping[str, Callable[[Series], bool]] = {
        "fitted: only the number of GPUs differs": lambda each: each.has_one_microbatch,
        "held out: the microbatch differs, too": lambda each: not each.has_one_microbatch,
    }
    for name, belongs in groups.items():
        errors = [each for series in counted() if belongs(series) for each in change_errors(series)]
        rows.append((name, str(len(errors)), *_spread(errors)))
    slow = [each for series in SERIES if _use(series) == "explains" for each in change_errors(series)]
    rows.append(("held out: ZeRO-3 with one of 8 network cards (an explanation)", str(len(slow)), *_spread(slow)))
    unsure = [each for series in SERIES if _use(series) == "unsure" for each in change_errors(series)]
    rows.append(("held out: FSDP to 2,048 GPUs (microbatch assumed)", str(len(unsure)), *_spread(unsure)))
    return Table(("changes", "number", "median", "median without sign", "largest without sign"), rows)


def fit_table() -> Table:
    """Return the noise fitted to all sources, and to all but one."""
    rows = [("none", f"{fitted_noise(fitted()):.3f}")]
    for source in dict.fromkeys(each.source for each in fitted()):
        rows.append((source, f"{fitted_noise([each for each in fitted() if each.source != source]):.3f}"))
    return Table(("left out", "STRAGGLER_NOISE"), rows)


def change_errors(series: Series) -> list[float]:
    """Return the errors of the series' changes."""
    return [each.change_error for each in compare(series) if each.change_error is not None]


def sources_table() -> Table:
    """Return where each source is to be found."""
    return Table(("source", "where"), list(PLACES.items()))


def curve_table(model: Model, machine: Machine, load: Load) -> Table:
    """Return efficiency and step time of each strategy on each number of GPUs."""
    curves = {name: curve(name, model, machine, load) for name in STRATEGIES}
    rows = [
        (f"{num_gpus:,}", *(_spot(curves[name][place]) for name in STRATEGIES))
        for place, num_gpus in enumerate(WORLDS)
        if any(curves[name][place] is not None for name in STRATEGIES)
    ]
    return Table(("GPUs", *STRATEGIES), rows)


def paying_table(machines: Sequence[Machine], load: Load, models: Mapping[str, Model] = BY_NAME) -> Table:
    """Return, for each machine and model, up to how many GPUs each strategy is 80% and 50% efficient."""
    rows = []
    for machine in machines:
        for name, model in models.items():
            cells = [_paying(curve(strategy, model, machine, load)) for strategy in STRATEGIES]
            rows.append((machine.name, name, *cells))
    return Table(("machine", "model", *STRATEGIES), rows)


def shards_table(machines: Sequence[Machine], models: Mapping[str, Model] = BY_NAME) -> Table:
    """Return how many GPUs hold a copy where HSDP is fastest, and its speed against FSDP2's."""
    rows = []
    for machine in machines:
        for name, model in models.items():
            cells = [_shards(model, machine, num_gpus) for num_gpus in (64, 512, 4096)]
            rows.append((machine.name, name, *cells))
    return Table(("machine", "model", "64 GPUs", "512 GPUs", "4,096 GPUs"), rows)


def tensor_parallel_table(machine: Machine, *, global_batch: int = 256, length: int = 4096) -> Table:
    """Return which part of a step computes, and MFU, where groups of 8 GPUs share layers and one sample at a time.

    Next to it FSDP2 alone, where every GPU has a sample. Models are fused, and recompute.
    """
    layouts = {"FSDP2 alone": (global_batch, 1)} | {f"t = 8, x{more}": (global_batch * more, 8) for more in (2, 4, 8)}
    rows = []
    for name, model in {"8B": LLAMA_8B, "70B": LLAMA_70B, "405B": LLAMA_405B}.items():
        cells = []
        for num_gpus, size in layouts.values():
            microbatches = global_batch * size // num_gpus
            work = fused(model).work(length=length, samples=1, microbatches=microbatches, recomputed=1.0)
            widths = {"hidden": model.hidden, "intermediate": model.intermediate, "item_bytes": 2}
            split = work.shared(size, **widths) if size > 1 else work
            time = step_time("fsdp2", split, device=machine.device, cluster=machine.of(num_gpus))
            mfu = work.flops_per_token * length * global_batch / (time.seconds * num_gpus * machine.peak_flops)
            cells.append(f"{time.parts['computation'] / time.seconds:.0%}, {mfu:.0%}")
        rows.append((name, *cells))
    names = [
        f"{num_gpus:,} GPUs, {'FSDP2 alone' if size == 1 else f't = {size}'}" for num_gpus, size in layouts.values()
    ]
    return Table(("model: computes, MFU", *names), rows)


def page_tables() -> Mapping[str, Table]:
    """Return the tables of docs/proof/scaling.md by the names of their places."""
    machines = usual()
    infiniband, _, ethernet = machines
    return {
        "pays-weak": paying_table(machines, WEAK),
        "pays-strong": paying_table(machines, STRONG),
        "curve-8b": curve_table(BY_NAME["8B"], infiniband, WEAK),
        "curve-8b-ethernet": curve_table(BY_NAME["8B"], ethernet, WEAK),
        "shards": shards_table(machines),
        "tensor-parallel": tensor_parallel_table(infiniband),
        "errors": errors_table(),
        "fit": fit_table(),
        "published": published_table(),
        "sources": sources_table(),
    }


def _published_row(each: Compared) -> tuple[str, ...]:
    series, point = each.series, each.point
    digits = 2 if series.unit == RELATIVE else 0
    return (
        series.source,
        series.name,
        f"{series.strategy}, {point.num_gpus:,} {series.gpu}, {series.network_gbit:,.0f} Gbit/s",
        f"{series.length} x {point.samples} x {point.microbatches}",
        f"{point.measured:,.{digits}f} {series.unit}",
        f"{each.modeled:,.{digits}f}",
        "" if each.level_error is None else f"{each.level_error:+.0%}",
        "" if each.change_error is None else f"{each.change_error:+.1%}",
        _use(series),
    )


def _use(series: Series) -> str:
    """Return what the series is for."""
    if series.is_explained:
        return "missed"
    if not series.is_counted:
        return "unsure" if series.unit == RELATIVE else "explains"
    return "fitted" if series in fitted() else "held out"


def _spread(errors: Sequence[float]) -> tuple[str, str, str]:
    sizes = [abs(each) for each in errors]
    return f"{median(errors):+.1%}", f"{median(sizes):.1%}", f"{max(sizes):.1%}"


def _spot(found: Spot | None) -> str:
    return "-" if found is None else f"{found.efficiency:.0%} ({found.time.seconds:.3g} s)"


def _paying(spots: Sequence[Spot | None]) -> str:
    if all(each is None for each in spots):
        return "does not fit"
    cells = []
    for least in LEAST:
        best = largest_that_pays(spots, least=least)
        last = max(each.num_gpus for each in spots if each is not None)
        cells.append("never" if best is None else f"{best.num_gpus:,}{'+' if best.num_gpus == last else ''}")
    return " / ".join(cells)


def _shards(model: Model, machine: Machine, num_gpus: int) -> str:
    place = WORLDS.index(num_gpus)
    hsdp, fsdp2 = (curve(name, model, machine, WEAK)[place] for name in ("hsdp", "fsdp2"))
    if hsdp is None or fsdp2 is None:
        return "-"
    return f"{num_gpus // hsdp.shards} x {hsdp.shards}: x {fsdp2.time.seconds / hsdp.time.seconds:.2f}"
