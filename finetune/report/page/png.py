"""The charts of a page as PNG files for papers, drawn with matplotlib (extra `plots`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.runtime.optional import require

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
