"""Charts as plain values for charts.js, with scales from steps to tokens and seconds, and drawn as PNG files."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from finetune.report.curves import Curve
from finetune.report.history import RunHistory
from finetune.runtime.optional import require

GB = 1e9
"""Bytes per GB in all sizes of the page."""


@dataclass(frozen=True)
class ChartKind:
    """A chart of one or more curves, whose values are multiplied by `scale`; `logs` offers a log scale."""

    title: str
    curves: Mapping[str, str]  # from the name of a curve to its label
    scale: float = 1.0
    unit: str = ""
    logs: bool = False
    is_share: bool = False
    starts_at_zero: bool = False
    smooths: bool = True


LOSS = ChartKind("Loss", {"loss": "training", "evaluation/loss": "evaluation"}, unit="nats per target", logs=True)
TIME = ChartKind("Seconds per step", {"seconds_per_step": "step"}, unit="s", logs=True, starts_at_zero=True)
FIXED = (
    LOSS,
    ChartKind("Learning rate", {"learning_rate": "learning rate"}, starts_at_zero=True, smooths=False),
    ChartKind("Gradient norm", {"gradient_norm": "gradient norm"}, logs=True),
    ChartKind("Tokens per second", {"tokens_per_second": "tokens/s"}, unit="tokens/s", starts_at_zero=True),
    ChartKind("MFU: share of the devices' peak", {"mfu": "MFU"}, is_share=True, starts_at_zero=True),
    TIME,
    ChartKind("Time spent waiting for data", {"data_share": "share"}, is_share=True, starts_at_zero=True),
    ChartKind("Peak memory of rank 0", {"memory_bytes": "memory"}, 1 / GB, "GB", starts_at_zero=True, smooths=False),
    ChartKind(
        "Checkpoints",
        {"save_seconds": "until complete", "stall_seconds": "training waited"},
        unit="s",
        starts_at_zero=True,
    ),
)
DEVICE = (
    ChartKind("GPU utilization", {"device/gpu_utilization": "utilization"}, is_share=True, starts_at_zero=True),
    ChartKind("GPU power", {"device/gpu_power_watts": "power"}, unit="W", starts_at_zero=True),
    ChartKind("GPU temperature", {"device/gpu_temperature_celsius": "temperature"}, unit="°C"),
    ChartKind("GPU memory in use", {"device/gpu_memory_used_bytes": "memory"}, 1 / GB, "GB", starts_at_zero=True),
    ChartKind(
        "Link traffic",
        {"device/pcie_bytes_per_second": "PCIe", "device/nvlink_bytes_per_second": "NVLink"},
        1e-9,
        "GB/s",
        starts_at_zero=True,
    ),
)
POINTS = ("evaluation/", "save_seconds", "stall_seconds")
"""Curves of few points, which are drawn with markers and not smoothed."""


def chart_kinds(names: set[str]) -> list[ChartKind]:
    """Return the charts for curves of these names: the loss, then the evaluated metrics, then the others."""
    fixed = [chart for chart in (*FIXED, *DEVICE) if names & chart.curves.keys()]
    used = {name for chart in fixed for name in chart.curves}
    others = names - used - {"tokens", "seconds", "device_seconds", "epoch"}
    evaluated_first = sorted(others, key=lambda name: (not name.startswith("evaluation/"), name))
    own = []
    for name in evaluated_first:
        group, _, metric = name.partition("/")
        title = {"evaluation": "Evaluation: ", "metrics": "Training: ", "device": "GPU: "}.get(group)
        own.append(ChartKind(f"{title}{metric}" if title else name, {name: metric or name}))
    return [*fixed[:1], *own, *fixed[1:]]


def charts_of(history: RunHistory) -> list[dict[str, Any]]:
    """Return the charts of one run."""
    kinds = [in_unit(chart, history.unit) for chart in chart_kinds(set(history.curves))]
    return [format_chart(chart, [("", history.curves)]) for chart in kinds]


def in_unit(chart: ChartKind, unit: str) -> ChartKind:
    """Return the chart for runs whose throughput has this unit."""
    is_rate = "tokens_per_second" in chart.curves
    return replace(chart, title=f"{unit.capitalize()} per second", unit=f"{unit}/s") if is_rate else chart


def format_chart(chart: ChartKind, runs: Sequence[tuple[str, Mapping[str, Curve]]]) -> dict[str, Any]:
    """Return a chart of the same curves of several named runs; runs without such a curve are skipped."""
    series = []
    for run, (name, curves) in enumerate(runs):
        for style, (column, label) in enumerate(chart.curves.items()):
            if column not in curves:
                continue
            points, has_marks = curves[column].points(), column.startswith(POINTS)
            drawn: dict[str, Any] = {
                **{"run": run, "style": style, "label": label, "marks": has_marks},
                "not_finite": curves[column].num_not_finite,
                "name": f"{name} {label}".strip() if len(chart.curves) > 1 or not name else name,
                **{"width": points.width, "x": rounded(points.steps, digits=9)},
                "y": rounded(points.values * chart.scale),
            }
            if not has_marks and points.width > 1:  # otherwise each point is its mean
                means = {"x": rounded(points.mean_steps, digits=9), "y": rounded(points.means * chart.scale)}
                drawn["means"] = means
            series.append(drawn)
    return {
        "id": re.sub(r"\W+", "-", chart.title.lower()).strip("-"),
        "title": chart.title,
        "unit": chart.unit,
        "logs": chart.logs,
        "share": chart.is_share,
        "zero": chart.starts_at_zero,
        "smooths": chart.smooths,
        "series": series,
    }


def step_scales(history: RunHistory) -> dict[str, Any]:
    """Return tokens, seconds and device hours as functions of the step, as points of piecewise linear curves."""
    by_scale = {}
    for name, scale in (("tokens", 1.0), ("seconds", 1.0), ("device_seconds", 1 / 3600)):
        if name in history.curves:
            points = history.curves[name].points()
            by_scale[name] = {"x": rounded(points.steps, digits=9), "y": rounded(points.values * scale, digits=9)}
    return by_scale


def rounded(values: np.ndarray, *, digits: int = 6) -> list[float | int]:
    """Return the values with this number of significant digits, whole ones as integers: the page is half as large."""
    return [
        int(value) if value == int(value) and abs(value) < 1e15 else value
        for value in (float(f"{value:.{digits}g}") for value in values.tolist())
    ]


_COLORS = ("#2563c9", "#d9700a", "#17865a", "#a23fae", "#a98600", "#0c8ba0", "#cf3a46", "#6d5f4d")
_DASHES = ("-", "--", ":")
_INCHES, _DPI = (6.0, 3.6), 200


def write_pngs(charts: Sequence[Mapping[str, Any]], folder: Path, *, num_runs: int = 1) -> list[Path]:
    """Write one PNG for each chart that has a point, and return their paths; extremes are pale, means are opaque.

    Raises MissingPackage where matplotlib is not installed.
    """
    require("matplotlib", extra="plots", purpose="--png")
    figures = require("matplotlib.figure", extra="plots", purpose="--png")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for chart in charts:
        if not any(series["x"] for series in chart["series"]):
            continue
        figure = figures.Figure(figsize=_INCHES, dpi=_DPI, layout="constrained")
        _draw(figure.add_subplot(), chart, num_runs=num_runs)
        path = folder / f"{chart['id']}.png"
        figure.savefig(path)
        paths.append(path)
    return paths


def _draw(axes: Any, chart: Mapping[str, Any], *, num_runs: int) -> None:
    for series in chart["series"]:
        number = series["run"] if num_runs > 1 else series["style"]
        look = {"color": _COLORS[number % len(_COLORS)], "label": _plain(series["name"] or chart["title"])}
        dash = _DASHES[series["style"] % len(_DASHES)] if num_runs > 1 else "-"
        if series["marks"]:
            axes.plot(series["x"], series["y"], dash, marker="o", markersize=3, linewidth=1, **look)
        elif "means" in series:
            axes.plot(series["x"], series["y"], dash, linewidth=0.5, alpha=0.35, color=look["color"])
            axes.plot(series["means"]["x"], series["means"]["y"], dash, linewidth=1.3, **look)
        else:
            axes.plot(series["x"], series["y"], dash, linewidth=1.2, **look)
    axes.set_xlabel("step")
    axes.set_ylabel(_plain(" ".join(filter(None, (chart["title"], f"({chart['unit']})" if chart["unit"] else "")))))
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if chart["zero"]:
        axes.set_ylim(bottom=0)
    if len(chart["series"]) > 1:
        axes.legend(frameon=False, fontsize=8)


def _plain(text: str) -> str:
    """Return the text with the characters escaped that begin mathtext in matplotlib."""
    return text.replace("$", r"\$")
