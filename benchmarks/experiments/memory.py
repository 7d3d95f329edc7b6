"""What each way of saving memory saves, and what it costs: live bytes over one step, and CPU-seconds per step.

    python benchmarks/experiments/memory.py [--folder OUT] [--rounds 9] [--only plain,selective]

Every allocation and release of one step is recorded (torch.profiler), so the bytes are exact: weights, gradients,
optimizer state, activations and what kernels need for a moment. Costs are taken without the profiler, the variants in
turn, shuffled each round: medians of ratios to `plain` of the same round. On a GPU bytes are the GPU's.
Writes memory.json and memory.png.
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from memory_plot import draw
from memory_variants import SIZES, VARIANTS, Trainer

PHASES = ("forward", "backward", "step")
MB = 1e6


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = options.only.split(",") if options.only else [name for name, each in VARIANTS.items() if each.fits(device)]
    trainers = {name: Trainer(VARIANTS[name], Accelerator(cpu=device == "cpu")) for name in wanted}
    for trainer in trainers.values():
        trainer.step()  # optimizer state exists from here on
    found = {name: recorded(trainer, device) for name, trainer in trainers.items()}
    ratios = costs(trainers, rounds=options.rounds)
    rows = {name: {**summary(found[name]), **ratios[name], "loss": trainers[name].loss} for name in trainers}
    print_table(rows, device=device)
    options.folder.mkdir(parents=True, exist_ok=True)
    about = {"device": device, "torch": torch.__version__, "rounds": options.rounds, **SIZES}
    (options.folder / "memory.json").write_text(json.dumps({"about": about, "variants": rows}, indent=1))
    draw(found, options.folder / "memory.png", title=f"Live bytes over one step ({SIZES['text']}, {device})")
    print(f"written: {options.folder}/memory.json, {options.folder}/memory.png")


def recorded(trainer: Trainer, device: str) -> dict[str, list]:
    """Return the live bytes after each allocation and release of one step, when it was, and where phases begin."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    held = trainer.held_bytes()
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        trainer.step()
    events = profile.profiler.kineto_results.events()
    wanted = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in events
        if event.name() == "[memory]" and event.device_type() == wanted
    )
    starts = {event.name(): event.start_ns() for event in events if event.name() in PHASES}
    first, last = min(starts.values()), changes[-1][0]
    live, times = [], []
    for moment, change in changes:
        held += change
        live.append(held)
        times.append((moment - first) / (last - first))
    return {"live": live, "times": times, "starts": [(starts[name] - first) / (last - first) for name in PHASES]}


def summary(timeline: dict[str, list]) -> dict[str, float]:
    """Return the peak of the step and of each phase, in MB, and what is held at the end."""
    bounds = [*timeline["starts"], float("inf")]
    peaks = {
        f"{name}_mb": max(
            (live for live, at in zip(timeline["live"], timeline["times"], strict=True) if start <= at < stop),
            default=0,
        )
        / MB
        for name, start, stop in zip(PHASES, bounds, bounds[1:], strict=False)
    }
    return {"peak_mb": max(timeline["live"]) / MB, **peaks, "held_mb": timeline["live"][-1] / MB}


def costs(trainers: dict[str, Trainer], *, rounds: int) -> dict[str, dict[str, float]]:
    """Return the CPU-seconds of a step and their ratio to plain's, medians over the rounds, with quartiles."""
    order = random.Random(1)
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name in order.sample(list(trainers), len(trainers)):
            started = time.process_time()
            trainers[name].step()
            taken[name].append(time.process_time() - started)
    plain = taken.get("plain") or next(iter(taken.values()))
    found = {}
    for name, seconds in taken.items():
        low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, plain, strict=True)], n=4)
        found[name] = {"seconds": statistics.median(seconds), "ratio": middle, "low": low, "high": high}
    return found


def print_table(rows: dict[str, dict[str, float]], *, device: str) -> None:
    first = next(iter(rows.values()))
    print(f"{SIZES['text']}; {device}; MB live; time: CPU-seconds per step as a ratio to plain")
    titles = "".join(f"{word:>9}" for word in ("peak", "of plain", *PHASES, "held", "time"))
    print(f"{'variant':<28}{titles}  quartiles")
    for name, row in rows.items():
        peaks = "".join(f"{row[f'{phase}_mb']:>9.1f}" for phase in (*PHASES, "held"))
        spread = f"{row['low']:.2f}-{row['high']:.2f}"
        share = row["peak_mb"] / first["peak_mb"]
        print(f"{name:<28}{row['peak_mb']:>9.1f}{share:>9.2f}{peaks}{row['ratio']:>9.2f}  {spread}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("memory"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="only these variants, separated by commas; `plain` first")
    return parser.parse_args()


if __name__ == "__main__":
    main()
