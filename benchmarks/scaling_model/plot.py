"""The curves as a picture: efficiency against the number of GPUs, a panel for each machine."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scaling_model.curves import STRATEGIES, WORLDS, Load, curve
from scaling_model.machines import Machine
from scaling_model.models import Model

_STYLES = {"zero1": "--", "zero2": ":", "zero3": "--"}
"""Of those that lie on others: ZeRO-1 and -2 on each other with one microbatch, ZeRO-3 on FSDP2."""


def draw(path: Path, name: str, model: Model, machines: Sequence[Machine], load: Load) -> None:
    """Write the picture."""
    figure = Figure(figsize=(4.6 * len(machines), 4.0), layout="constrained")
    axes = figure.subplots(1, len(machines), sharey=True, squeeze=False)[0]
    for panel, machine in zip(axes, machines, strict=True):
        for strategy in STRATEGIES:
            spots = [each for each in curve(strategy, model, machine, load) if each is not None]
            if spots:
                numbers = [each.num_gpus for each in spots]
                shares = [each.efficiency for each in spots]
                panel.plot(numbers, shares, _STYLES.get(strategy, "-"), marker="o", markersize=3, label=strategy)
        for least in (0.5, 0.8):
            panel.axhline(least, color="grey", linewidth=0.6, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_xticks(WORLDS, [f"{each:,}" for each in WORLDS], rotation=45)
        panel.set_ylim(0, 1)
        panel.set_title(machine.name, fontsize=10)
        panel.set_xlabel("GPUs")
    axes[0].set_ylabel(f"part of a step that computes, Llama {name}")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
