"""Trains the quickstart under six strategies and draws the six losses: they lie on one curve.

    python benchmarks/same_loss.py [--steps 120] [--strategies ddp ...] [--out docs/same-loss.png]

One process, and two gloo processes under DDP, FSDP2 and ZeRO-1, -2, -3; the job file is the same, only the accelerate
file changes. The lower panel shows by how much each loss differs from that of one process. About ten minutes on two
cores. Exits with 1 where a loss differs by more than 1e-4.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen before

from finetune.report.history import read_events
from finetune.runtime.processes import free_loopback_port

ROOT = Path(__file__).parents[1]
STRATEGIES = {
    "single": "one process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
COLOURS = ("#c9ced6", "#1b6ca8", "#e07a1f", "#2a7f62", "#b3362f", "#6b4c9a")
TOLERANCE = 1e-4


def main() -> int:
    """Train, draw, and return 1 where the losses differ."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="same-loss-") as scratch:
        folder = Path(options.folder or scratch)
        job = folder / "job.yaml"
        if not job.exists():
            _run([sys.executable, "-m", "finetune", "init", "quickstart", "--into", str(folder)])
        losses = {name: train(job, name, steps=options.steps) for name in ("single", *options.strategies)}
    apart = {name: differences(each, losses["single"]) for name, each in losses.items() if name != "single"}
    for name, each in apart.items():
        print(f"{STRATEGIES[name]:<8} differs from one process by at most {each.max():.1e} (relative)")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(losses, apart, options.out)
    print(options.out)
    return int(any(each.max() > TOLERANCE for each in apart.values()))


def train(job: Path, strategy: str, *, steps: int) -> np.ndarray:
    """Return the loss of every step."""
    run = job.parent / "runs" / strategy
    if not (run / "final").exists():
        command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_loopback_port())]
        command += ["--config_file", str(ROOT / "accelerate_configs" / f"{strategy}.yaml")]
        command += ["--num_processes", "1" if strategy == "single" else "2"]
        command += ["-m", "finetune", "--config", str(job)]
        length = (f"train.steps={steps}", f"train.schedule.warmup_steps={steps // 3}")
        for override in (f"run.folder={run}", *length, "evaluate=null", "data.validation=null"):
            command += ["--set", override]
        _run(command)
    return np.array([event["loss"] for event in read_events(run / "events.jsonl") if event["event"] == "StepTaken"])


def differences(losses: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return by how much each loss differs from the reference's, relative."""
    return np.abs(losses - reference) / reference


def draw(losses: Mapping[str, np.ndarray], apart: Mapping[str, np.ndarray], path: Path) -> None:
    """Draw the losses above, each thinner than the one below it, and their differences on a logarithmic scale."""
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.4, 4.6), sharex=True, layout="constrained", height_ratios=(2.6, 1)
    )
    for number, (name, each) in enumerate(losses.items()):
        steps = np.arange(1, len(each) + 1)
        style = {"lw": 9.0} if number == 0 else {"lw": 1.8, "ls": (2.5 * (number - 1), (2.5, 10))}
        above.plot(steps, each, color=COLOURS[number], label=STRATEGIES[name], solid_capstyle="round", **style)
        if name in apart:
            below.plot(steps, np.maximum(apart[name], 1e-9), ".", color=COLOURS[number], ms=3)
    above.set_ylabel("training loss")
    above.set_ylim(bottom=0)
    legend = above.legend(frameon=False, ncols=2, fontsize=9, handlelength=3)
    for handle in legend.get_lines()[1:]:
        handle.set_linestyle("-")
    above.set_title(f"One job, {len(losses)} strategies: one loss", loc="left", fontsize=11, fontweight="bold")
    below.set_yscale("log")
    below.set_ylim(5e-10, 1e-3)
    below.set_yticks([1e-9, 1e-6, 1e-3], ["0", "1e-6", "1e-3"])
    below.set_ylabel("difference from\none process")
    below.set_xlabel(
        "step (fp32, 2 processes on CPU; differences are relative, 6e-8 is one rounding error)", fontsize=9
    )
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, len(next(iter(losses.values()))) + 1)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _run(command: list[str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    others = [name for name in STRATEGIES if name != "single"]
    parser.add_argument("--strategies", nargs="+", choices=others, default=others, help="those beside one process")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "same-loss.png")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; unset, a folder that is removed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
