"""The picture of `memory.py`: each variant's live bytes over one step, plain's in grey behind."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

MB = 1e6
COLUMNS = 3


def draw(found: dict[str, dict[str, list]], path: Path, *, title: str) -> None:
    """Draw a small picture of each variant, all on one scale."""
    plain = found.get("plain") or next(iter(found.values()))
    num_rows = -(-len(found) // COLUMNS)
    figure, grid = plt.subplots(
        num_rows, COLUMNS, figsize=(11, 2.3 * num_rows + 0.6), sharex=True, sharey=True, squeeze=False
    )
    for place, (name, timeline) in zip(grid.flat, found.items(), strict=False):
        place.fill_between(plain["times"], [live / MB for live in plain["live"]], color="0.88", step="post", lw=0)
        place.step(timeline["times"], [live / MB for live in timeline["live"]], where="post", color="C0", lw=1)
        for start, phase in zip(timeline["starts"], ("forward", "backward", "step"), strict=True):
            place.axvline(start, color="0.6", lw=0.6, ls=":")
            beside = place.get_xaxis_transform()
            place.text(start + 0.01, 0.97, phase, fontsize=7, color="0.35", va="top", transform=beside)
        peak = max(timeline["live"]) / MB
        place.set_title(f"{name}: {peak:.0f} MB ({peak * MB / max(plain['live']):.2f})", fontsize=9)
        place.set_xlim(0, 1)
        place.spines[["top", "right"]].set_visible(False)
    for place in list(grid.flat)[len(found) :]:
        place.set_visible(False)
    for row in grid:
        row[0].set_ylabel("MB live")
    grid[0, 0].set_ylim(0, 1.12 * max(max(each["live"]) for each in found.values()) / MB)
    figure.suptitle(f"{title}; grey: plain", fontsize=11)
    figure.supxlabel("share of the step's time", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
