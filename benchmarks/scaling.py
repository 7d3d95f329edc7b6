"""Step time against the number of GPUs: where each strategy stops paying, and the model next to published runs.

    python benchmarks/scaling.py               # the tables of both pages, as Markdown
    python benchmarks/scaling.py --write       # writes them into docs/proof/ and benchmarks/experiments/
    python benchmarks/scaling.py --fit         # the one fitted number, without each source in turn

`finetune plan` uses the same code for the step time of a job, on any hardware that it is given.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from finetune.commands.plan.step_time import step_time  # noqa: E402  # found by the line above

from scaling_model.curves import (  # noqa: E402
    LENGTH,
    MACHINES,
    STRATEGIES,
    WORLDS,
    ScalingPoint,
    curve,
    largest_that_pays,
)
from scaling_model.models import LLAMA_3, LLAMA_405B, fused  # noqa: E402
from scaling_model.published import RELATIVE, Series, compare, fitted_noise  # noqa: E402
from scaling_model.series import SERIES, counted, fitted  # noqa: E402

PAGES = (ROOT / "docs/proof/scaling.md", ROOT / "benchmarks/experiments/scaling.md")
Rows = Sequence[Sequence[str]]


def main() -> None:
    """Print the tables or the fit, or write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into their pages")
    parser.add_argument("--fit", action="store_true", help="fit STRAGGLER_NOISE again")
    options = parser.parse_args()
    if options.write:
        for page in PAGES:
            page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
    elif options.fit:
        print(table(("left out", "STRAGGLER_NOISE"), fits()))
    else:
        print("\n\n".join(f"{name}\n{text}" for name, text in page_tables().items()))


def filled(page: str) -> str:
    """Return the page with each table between its marks; raises KeyError for marks without a table."""
    tables = page_tables()
    marks = r"<!-- table ([\w-]+) -->\n.*?<!-- end -->"
    return re.sub(marks, lambda at: f"<!-- table {at[1]} -->\n{tables[at[1]]}\n<!-- end -->", page, flags=re.DOTALL)


def table(header: Sequence[str], rows: Rows) -> str:
    """Return the rows as Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows))


def page_tables() -> Mapping[str, str]:
    """Return the tables of the pages by the names in their marks."""
    return {
        "tensor-parallel": tensor_parallel_table(),
        "pays": table(("machine", "model", *STRATEGIES), _paying_rows()),
        "curve-8b": table(("GPUs", *STRATEGIES), _curve_rows()),
        "errors": table(("changes", "number", "median", "median without sign", "largest without sign"), error_rows()),
        "published": table(
            ("source", "model", "strategy", "GPUs", "measured", "modeled", "level", "change", "use"),
            [_series_row(series) for series in SERIES],
        ),
    }


def _paying_rows() -> Rows:
    """Return, for each machine and model, up to how many GPUs each strategy is 80% and 50% efficient."""
    return [
        (where.name, name, *(_paying(curve(strategy, model, where)) for strategy in STRATEGIES))
        for where in MACHINES
        for name, model in LLAMA_3.items()
    ]


def _paying(points: Sequence[ScalingPoint | None]) -> str:
    if not any(points):
        return "does not fit"
    last = max(each.num_gpus for each in points if each is not None)
    best = [largest_that_pays(points, least=least) for least in (0.8, 0.5)]
    return " / ".join("never" if at is None else f"{at.num_gpus:,}{'+' * (at.num_gpus == last)}" for at in best)


def _curve_rows() -> Rows:
    """Return efficiency and step time of each strategy for 8B on the first machine."""
    curves = [curve(strategy, LLAMA_3["8B"], MACHINES[0]) for strategy in STRATEGIES]
    return [
        (f"{num_gpus:,}", *("-" if at is None else f"{at.efficiency:.0%} ({at.time.seconds:.3g} s)" for at in points))
        for num_gpus, *points in zip(WORLDS, *curves, strict=True)
    ]


def tensor_parallel_table(*, global_batch: int = 256) -> str:
    """Return which part of a step computes, and MFU, where groups of 8 GPUs share layers and one sample at a time.

    Next to it FSDP2 alone, where every GPU has a sample. Models are fused, and recompute.
    """
    where = MACHINES[0]
    device, peak = where.hardware.device("bf16"), where.hardware.gpu.peak_flops("bf16")
    layouts = {f"{global_batch} GPUs, FSDP2 alone": (global_batch, 1)}
    layouts |= {f"{global_batch * more:,} GPUs, t = 8": (global_batch * more, 8) for more in (2, 4, 8)}
    rows = []
    for name, model in {"8B": LLAMA_3["8B"], "70B": LLAMA_3["70B"], "405B": LLAMA_405B}.items():
        cells = []
        for num_gpus, size in layouts.values():
            work = fused(model).work(LENGTH, 1, global_batch * size // num_gpus, 1.0)
            widths = {"hidden": model.hidden, "intermediate": model.intermediate, "item_bytes": 2}
            split = work.shared(size, **widths) if size > 1 else work
            time = step_time("fsdp2", split, device=device, cluster=where.cluster(num_gpus))
            mfu = work.flops_per_token * LENGTH * global_batch / (time.seconds * num_gpus * peak)
            cells.append(f"{time.parts['computation'] / time.seconds:.0%}, {mfu:.0%}")
        rows.append((name, *cells))
    return table(("model: computes, MFU", *layouts), rows)


def error_rows() -> Rows:
    """Return the errors of the changes by what the series are for."""
    groups: Mapping[str, Callable[[Series], bool]] = {
        "fitted: only the number of GPUs differs": lambda each: _use(each) == "fitted",
        "held out: the microbatch differs, too": lambda each: each in counted() and _use(each) == "held out",
        "held out: ZeRO-3 with one of 8 network cards (an explanation)": lambda each: _use(each) == "explains",
        "held out: FSDP to 2,048 GPUs (microbatch assumed)": lambda each: _use(each) == "unsure",
    }
    rows = []
    for name, belongs in groups.items():
        errors = [error for series in SERIES if belongs(series) for error in change_errors(series)]
        sizes = [abs(each) for each in errors]
        rows.append((name, str(len(errors)), f"{median(errors):+.1%}", f"{median(sizes):.1%}", f"{max(sizes):.1%}"))
    return rows


def fits() -> Rows:
    """Return the noise fitted to all sources, and to all but one."""
    sources = dict.fromkeys(each.source for each in fitted())
    others = [(source, [each for each in fitted() if each.source != source]) for source in sources]
    return [(name, f"{fitted_noise(series):.3f}") for name, series in [("none", fitted()), *others]]


def change_errors(series: Series) -> list[float]:
    """Return the errors of the series' changes."""
    return [each.change_error for each in compare(series) if each.change_error is not None]


def _series_row(series: Series) -> Sequence[str]:
    """Return the first and the last number of GPUs of a series; of the errors the largest, with their signs."""
    compared = compare(series)
    ends = [compared[0], *compared[-1:]] if len(compared) > 1 else compared
    digits = 2 if series.unit == RELATIVE else 0
    levels, changes = [each.level_error for each in compared if each.level_error is not None], change_errors(series)
    return (
        series.source,
        series.name,
        series.strategy,
        f"{' to '.join(f'{each.point.num_gpus:,}' for each in ends)} {series.gpu}, {series.network_gbit:,.0f} Gbit/s",
        f"{', '.join(f'{each.point.measured:,.{digits}f}' for each in ends)} {series.unit}",
        ", ".join(f"{each.modeled:,.{digits}f}" for each in ends),
        f"{max(levels, key=abs):+.0%}" if levels else "",
        f"{max(changes, key=abs):+.1%}" if changes else "",
        _use(series),
    )


def _use(series: Series) -> str:
    """Return what the series is for."""
    if series.is_explained:
        return "missed"
    if not series.is_counted:
        return "unsure" if series.unit == RELATIVE else "explains"
    return "fitted" if series in fitted() else "held out"


if __name__ == "__main__":
    main()
