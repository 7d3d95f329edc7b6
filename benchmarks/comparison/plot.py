"""One plot of all results: what was measured against its threshold."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib

from comparison.results import Result

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # the backend is chosen before

COLOURS = {"met": "#2a7f62", "within the spread": "#c9a227", "not reached": "#4a7fb5", "MISSED": "#b3362f"}
SHOWN = 2.0
"""How far beyond the threshold a bar may reach before it is cut."""


PLAIN = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def draw(found: Sequence[Result], path: Path, *, title: str) -> None:
    """Draw a bar a result: the median as a share of its threshold, whiskers at the quartiles, the threshold at 1."""
    figure, axes = plt.subplots(figsize=(13, 1.6 + 0.36 * len(found)), layout="constrained")
    places = range(len(found), 0, -1)
    for place, each in zip(places, found, strict=True):
        low, median, high = (
            value / (each.threshold or 1.0) for value in (each.spread.low, each.spread.median, each.spread.high)
        )
        axes.barh(place, min(median, SHOWN), color=COLOURS[each.verdict], height=0.62)
        whiskers = [[max(0.0, min(median, SHOWN) - low)], [max(0.0, min(high, SHOWN) - min(median, SHOWN))]]
        axes.errorbar(min(median, SHOWN), place, xerr=whiskers, color="#222222", capsize=3, linewidth=1)
        sign = "≤" if each.better == "lower" else "≥"
        text = f"{each.spread.median:.3g}{each.unit and ' ' + each.unit}  ({sign} {each.threshold:g})"
        axes.text(min(max(high, median, 0.0), SHOWN) + 0.03, place, text, va="center", fontsize=8, bbox=PLAIN)
    axes.axvline(1.0, color="#222222", linewidth=1.2, linestyle="--")
    axes.set_yticks(list(places), [f"{_arrow(each)} {each.topic}  {each.what}" for each in found], fontsize=8)
    axes.set_xlim(min(0.0, *(each.spread.low / (each.threshold or 1.0) for each in found)), SHOWN + 0.5)
    axes.set_ylim(0.3, len(found) + 0.7)
    axes.set_xlabel("measured / threshold   (◂: left of the line is met, ▸: right of it)")
    figure.suptitle("\n".join(wrap(title, 150)), fontsize=9, x=0.01, ha="left")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, list(COLOURS), loc="outside lower right", fontsize=8, frameon=False, ncols=len(COLOURS))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _arrow(found: Result) -> str:
    return "◂" if found.better == "lower" else "▸"
