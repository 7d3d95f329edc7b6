"""Charts as plain values for charts.js, with scales from steps to tokens and seconds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetune.report.history import Curve, RunHistory

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
)
POINTS = ("evaluation/", "save_seconds", "stall_seconds")
"""Curves of few points, which are drawn with markers and not smoothed."""


def chart_kinds(names: set[str]) -> list[ChartKind]:
    """Return the charts for curves of these names: the loss, then the evaluated metrics, then the others."""
    fixed = [chart for chart in (*FIXED, *DEVICE) if names & chart.curves.keys()]
    used = {name for chart in fixed for name in chart.curves}
    others = names - used - {"tokens", "seconds", "epoch"}
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
    """Return tokens and seconds as functions of the step, as points of piecewise linear curves."""
    by_scale: dict[str, Any] = {}
    for name in ("tokens", "seconds"):
        if name in history.curves:
            points = history.curves[name].points()
            by_scale[name] = {"x": rounded(points.steps, digits=9), "y": rounded(points.values, digits=9)}
    return by_scale


def rounded(values: np.ndarray, *, digits: int = 6) -> list[float | int]:
    """Return the values with this number of significant digits, whole ones as integers: the page is half as large."""
    return [
        int(value) if value == int(value) and abs(value) < 1e15 else value
        for value in (float(f"{value:.{digits}g}") for value in values.tolist())
    ]
