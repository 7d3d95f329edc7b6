"""`finetune report` and `finetune compare`: the page of a run, and runs side by side, with results and differences.

Losses are bitwise equal, equal within rounding, equal within noise, or different from a step on. They are paired by
step, which removes the common trend; if the samples of each step are the same, the noise of the data cancels as well.
The remaining differences d are cut into windows. The runs agree within noise unless the mean of some window is further
from 0, in standard deviations of its window, than the furthest window of 95% of simulated series, so that many windows
raise no false alarm (max-T: Westfall and Young 1993, Resampling-Based Multiple Testing, ch. 2). A series is simulated
by the sieve bootstrap of order 1, which keeps the correlation of neighboring steps (Bühlmann 1997, Bernoulli 3(2),
123-148): an autoregression is fitted to the differences minus their window's mean, its coefficient corrected for that
(Marriott and Pope 1954, Biometrika 41, 390-402), and driven by its own residuals, drawn at random. So noise means
fluctuation within a window of steps; a difference that lasts for a window counts, be it a better learning rate or
another seed's luck.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.table import Table

from finetune.commands.compare.runs import (
    ComparedRun,
    Difference,
    config_differences,
    environment_differences,
    short_names,
)
from finetune.commands.printing import print_facts, print_json, print_table
from finetune.errors import UserError
from finetune.report.history import EVENTS_FILE, HistoryReader, Steps, read_history
from finetune.report.page.charts import chart_kinds, format_chart, in_unit, step_scales
from finetune.report.page.facts import (
    format_count,
    format_duration,
    format_metric,
    format_time,
    is_lower_better,
    read_run_files,
    run_state,
)
from finetune.report.page.page import SMOOTHING, render_page, write_report
from finetune.runtime.files import atomic


def report(run: Path) -> None:
    """Write the page of the run."""
    require_events(run)
    reader = HistoryReader(run / EVENTS_FILE)
    reader.read_new()
    print(f"wrote {write_report(run, reader.history)}")


def require_events(run: Path) -> None:
    """Raise UserError unless the folder is that of a run with events."""
    if not (run / EVENTS_FILE).is_file():
        problem = "has no events.jsonl: it is not the folder of a run" if run.is_dir() else "is not a folder"
        raise UserError(f"{run} {problem}. Write the run.folder of the job, or wait until its training begins.")


ROUNDING = 1e-4
"""The largest relative difference that counts as rounding, as between strategies (`finetune verify parity`)."""

LEVEL = 0.05
MIN_STEPS, MIN_WINDOW, MAX_WINDOWS, MAX_GROUPS = 40, 20, 20, 4000
_NUM_SERIES, _SEED = 1000, 0
_SMOOTHED_STEPS = 20
_LARGEST_COEFFICIENT = 0.99

Verdict = Literal["bitwise equal", "equal within rounding", "same within noise", "different", "unknown"]


@dataclass(frozen=True)
class Agreement:
    """The comparison of a run's losses with the first run's."""

    verdict: Verdict
    sentence: str
    num_common: int
    max_relative: float | None  # the largest difference of two losses at a step
    different_from: int | None  # the step
    order_differs_at: int | None  # the first step with different samples; None: never, or not known
    has_same_samples: bool


def compare_losses(reference: Steps, other: Steps) -> Agreement:
    """Return how the losses at common steps agree, and from which step on the samples differ."""
    steps, ours, theirs = np.intersect1d(reference.numbers, other.numbers, assume_unique=True, return_indices=True)
    if not len(steps):
        return Agreement("unknown", "the runs have no step in common", 0, None, None, None, False)
    first, second = reference.losses[ours], other.losses[theirs]
    samples, other_samples = reference.samples[ours], other.samples[theirs]
    differs = (samples != other_samples) & (samples != 0) & (other_samples != 0)
    order = int(steps[differs.argmax()]) if differs.any() else None
    is_known = bool(np.all(samples) and np.all(other_samples))
    verdict, sentence, largest, start = _judge(steps, first, second)
    return Agreement(verdict, sentence, len(steps), largest, start, order, is_known and order is None)


def _judge(steps: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[Verdict, str, float | None, int | None]:
    at_steps = f"at all {len(steps):,} common steps"
    if np.array_equal(first, second, equal_nan=True):
        return "bitwise equal", f"every loss is bitwise equal {at_steps}", 0.0, None
    is_finite = np.isfinite(first) & np.isfinite(second)
    if (np.isfinite(first) != np.isfinite(second)).any():
        start = int(steps[(np.isfinite(first) != np.isfinite(second)).argmax()])
        return "different", f"at step {start:,} one loss is finite and the other is not", None, start
    steps, first, second = steps[is_finite], first[is_finite], second[is_finite]
    largest = float(np.max(np.abs(first - second) / np.maximum(np.abs(first), 1e-12), initial=0.0))
    if largest <= ROUNDING:
        return "equal within rounding", f"losses are equal within {largest:.1e} (relative) {at_steps}", largest, None
    if len(steps) < MIN_STEPS:
        text = f"losses differ by up to {largest:.1e} (relative), and {len(steps)} steps are too few to know the noise"
        return "unknown", text, largest, None
    index, window, deviation = first_different_window(second - first)
    if index is None:
        text = f"no mean of {window} steps differs by more than noise explains (95%, bootstrap); "
        return "same within noise", text + f"the largest single difference is {largest:.1e} (relative)", largest, None
    start = int(steps[index])
    text = f"from step {start:,} on: over {window} steps the loss is {abs(deviation):.4f} "
    return "different", text + ("higher" if deviation > 0 else "lower") + ", more than noise explains", largest, start


def first_different_window(differences: np.ndarray) -> tuple[int | None, int, float]:
    """Return the start of the first window whose mean is not noise (None: none), its width, and that mean."""
    width = -(-len(differences) // MAX_GROUPS)  # steps in a group: in long runs, means of neighbors are compared
    groups = differences[: len(differences) // width * width].reshape(-1, width).mean(axis=1)
    num_windows = min(MAX_WINDOWS, len(groups) // MIN_WINDOW)
    window, left_over = divmod(len(groups), num_windows)
    windows = groups[left_over:].reshape(num_windows, window)  # at most 19 groups, at the start, are in no window
    means = windows.mean(axis=1)
    deviations = np.maximum(windows.std(axis=1, ddof=1), 1e-300)
    is_outside = np.abs(means) / deviations > _critical_value((windows - means[:, None]) / deviations[:, None])
    if not is_outside.any():
        return None, window * width, 0.0
    index = int(is_outside.argmax())
    return (left_over + index * window) * width, window * width, float(means[index])


def _critical_value(noise: np.ndarray) -> float:
    """Return the distance that the furthest window exceeds in 5% of simulated series; `noise` is [windows, steps]."""
    num_windows, window = noise.shape
    before, after = noise[:, :-1], noise[:, 1:]
    fitted = float((before * after).sum() / max((before * before).sum(), 1e-300))
    coefficient = min((fitted * window + 1) / (window - 3), _LARGEST_COEFFICIENT)
    generator = np.random.default_rng(_SEED)
    drawn = generator.choice((after - coefficient * before).ravel(), size=(num_windows * window + window, _NUM_SERIES))
    for step in range(1, len(drawn)):
        drawn[step] += coefficient * drawn[step - 1]
    series = drawn[window:].reshape(num_windows, window, _NUM_SERIES)  # the first window is the warm-up
    distances = np.abs(series.mean(axis=1)) / np.maximum(series.std(axis=1, ddof=1), 1e-300)
    return float(np.quantile(distances.max(axis=0), 1 - LEVEL))


@dataclass(frozen=True)
class Result:
    """The state of a run, and its metrics: each evaluation metric's last and best value."""

    run: str
    folder: str
    state: str
    num_processes: int
    steps: int
    tokens: float
    seconds: float
    training_loss: float | None  # mean of the last 20 steps
    last: dict[str, float]
    best: dict[str, float]
    missing: tuple[str, ...]


@dataclass(frozen=True)
class RunComparison:
    """The results of several runs; `agreements` compare the second and later runs with the first."""

    runs: tuple[ComparedRun, ...]
    results: tuple[Result, ...]
    agreements: tuple[Agreement, ...]
    config: tuple[Difference, ...]
    environment: tuple[Difference, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, without curves."""
        names = [run.name for run in self.runs]
        values = {
            "runs": [asdict(result) for result in self.results],
            "agreement_with_first": {
                name: asdict(agreement) for name, agreement in zip(names[1:], self.agreements, strict=True)
            },
        }
        tables = {"config_differences": self.config, "environment_differences": self.environment}
        return values | {
            title: {row.key: dict(zip(names, row.values, strict=True)) for row in rows}
            for title, rows in tables.items()
        }

    def charts(self) -> list[dict[str, Any]]:
        """Return the charts, each with the curves of all runs that have one."""
        curves = [(run.name, run.history.curves) for run in self.runs]
        names = set().union(*(run.history.curves for run in self.runs))
        unit = self.runs[0].history.unit
        return [format_chart(in_unit(chart, unit), curves) for chart in chart_kinds(names)]


def build_comparison(runs: Sequence[Path]) -> RunComparison:
    """Return the runs compared with the first one; raises UserError for a folder that is not that of a run."""
    if len(runs) < 2:
        raise UserError("compare: name two or more run folders. `finetune report RUN` shows a single one.")
    for run in runs:
        require_events(run)
    compared = [
        ComparedRun(name, folder, read_history(folder), read_run_files(folder))
        for folder, name in zip(runs, short_names(runs), strict=True)
    ]
    first, *others = compared
    return RunComparison(
        runs=tuple(compared),
        results=tuple(map(_result, compared)),
        agreements=tuple(compare_losses(first.history.steps, other.history.steps) for other in others),
        config=tuple(config_differences(compared)),
        environment=tuple(environment_differences(compared)),
    )


def _result(run: ComparedRun) -> Result:
    history = run.history
    state, _ = run_state(history, run.files.status, now=time.time())
    losses = history.steps.losses[-_SMOOTHED_STEPS:]
    is_known = len(losses) == _SMOOTHED_STEPS and bool(np.isfinite(losses).all())
    last, best = {}, {}
    for curve_name, curve in history.curves.items():
        values = curve.points().values.tolist()
        if curve_name.startswith("evaluation/") and values:
            name = curve_name.partition("/")[2]
            last[name], best[name] = values[-1], min(values) if is_lower_better(name) else max(values)
    return Result(
        run=run.name,
        folder=str(run.folder),
        state=state,
        num_processes=history.num_processes,
        steps=history.step,
        tokens=history.tokens,
        seconds=history.seconds,
        training_loss=float(losses.mean()) if is_known else None,
        last=last,
        best=best,
        missing=(*run.files.missing, *run.history.damaged),
    )


def compare_runs(runs: Sequence[Path], *, html: Path | None = None, json: bool = False) -> None:
    """Print the comparison, and write the page on request; with `json`, print only JSON.

    Raises UserError for a folder that is not that of a run.
    """
    if html is not None:
        write_comparison(runs, html)
    comparison = build_comparison(runs)
    if json:
        print_json(comparison.as_json())
        return
    print_comparison(comparison)
    if html is not None:
        print(f"wrote {html}")


TEMPLATES = Path(__file__).parent / "templates"
MAX_COLUMNS = 5
"""Runs that are shown as columns; more are shown as rows."""


def write_comparison(folders: Sequence[Path], target: Path) -> None:
    """Write the page that compares the runs, whole or not at all; raises UserError as `compare_runs` does."""
    comparison = build_comparison(folders)
    runs = comparison.runs
    results = [("run", *(run.name for run in runs)), *result_rows(comparison)]
    page = render_page(
        "compare.html.jinja",
        folder=TEMPLATES,
        data={
            "charts": comparison.charts(),
            "unit": runs[0].history.unit,
            "runs": [
                {"name": run.name, "color": number, "scales": step_scales(run.history)}
                for number, run in enumerate(runs)
            ],
        },
        title=" · ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs",
        unit=runs[0].history.unit,
        written=format_time(time.time()),
        comparison=comparison,
        results=results if len(runs) <= MAX_COLUMNS else list(zip(*results, strict=True)),
        missing=[
            f"{result.run}: not found or damaged: {', '.join(result.missing)}"
            for result in comparison.results
            if result.missing
        ],
        others=list(zip(runs[1:], comparison.agreements, strict=True)),
        smoothing=SMOOTHING,
    )
    atomic.write_bytes(target, page.encode("utf-8", errors="backslashreplace"))


def print_comparison(comparison: RunComparison) -> None:
    """Print results, agreement, and differences of config and environment."""
    names = [run.name for run in comparison.runs]
    missing = ("missing files", *(", ".join(result.missing) for result in comparison.results))
    _print_table(["", *names], [*result_rows(comparison), *([missing] if any(missing[1:]) else [])])
    for name, agreement in zip(names[1:], comparison.agreements, strict=True):
        order = "the same" if agreement.has_same_samples else "not known in full"
        if agreement.order_differs_at is not None:
            order = f"differs from step {agreement.order_differs_at:,} on"
        text = f"{agreement.verdict}: {agreement.sentence}. Sample order: {order}."
        print_facts([(name, text)], indent=len(name) + 2)
    for title, rows in (("config", comparison.config), ("environment", comparison.environment)):
        print(f"\n{title}: {'differences' if rows else 'no difference'}")
        for row in rows:
            print(row.key)
            facts = [(f"  {name}", value) for name, value in zip(names, row.values, strict=True)]
            print_facts(facts, indent=max(map(len, names)) + 4)


_RESULTS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("state", "state", str),
    ("processes", "num_processes", str),
    ("steps", "steps", "{:,}".format),
    ("tokens", "tokens", format_count),
    ("training time", "seconds", format_duration),
)


def result_rows(comparison: RunComparison) -> list[tuple[str, ...]]:
    """Return the results as rows: a name, then a text for each run."""
    results = comparison.results
    rows = [(title, *(show(getattr(result, name)) for result in results)) for title, name, show in _RESULTS]
    rows.append(("training loss", *(_value(result.training_loss) for result in results)))
    for metric in sorted({name for result in results for name in result.last}):
        rows.append((f"{metric}, last", *(_value(result.last.get(metric)) for result in results)))
        rows.append((f"{metric}, best", *(_value(result.best.get(metric)) for result in results)))
    return rows


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    print_table(table)


def _value(value: float | None) -> str:
    return "" if value is None else format_metric(value)
