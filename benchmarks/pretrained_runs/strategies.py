"""The quickstart's case on several processes: the losses of one process, under every strategy and after a kill."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.report.history import read_events

from comparison.controller import CompetitorFailed, Controller
from comparison.results import Log
from pretrained_runs.contestants import KILLED, NEW_ADAPTER, SAVED_STEP, STEPS_OF_TWO
from pretrained_runs.steps import OURS, relative_difference

STRATEGIES = ("ddp", "zero2", "zero3")
TENSOR_PARALLEL = {NEW_ADAPTER: 1, "tensor_parallel, groups of 3": 3, "fsdp2_tensor_parallel, groups of 3": 6}
"""By strategy, its processes: SmolLM2's 9 heads, 3 of them for keys, are shared by 3 ranks and not by 2.

An adapter that was trained before is not split, so that these runs begin one, and are compared with one process."""
RESUMED, RESUMED_UNDER = "pretrained resumed", "zero3"
WAITS_SECONDS = 120.0


def measure(
    folder: Path,
    *,
    reference: list[float],
    log: Log,
    strategies: tuple[str, ...] = STRATEGIES,
    tensor_parallel: Mapping[str, int] = TENSOR_PARALLEL,
) -> dict[str, Any]:
    """Return the losses under each strategy, and their difference from those of one process."""
    folder = folder.resolve()
    with Controller(folder, num_processes=2) as controller:
        controller.start([OURS])
        for strategy in strategies:
            controller.measure(folder, [OURS], rounds=STEPS_OF_TWO - 1, warm_up=0, strategy=strategy)
        with suppress(CompetitorFailed):  # asked for its end, it is at the last step
            controller.measure(folder, [OURS], rounds=STEPS_OF_TWO - 2, warm_up=0, strategy=KILLED)
        _wait_for(folder / "runs" / KILLED / "checkpoints" / f"step-{SAVED_STEP:06d}" / "manifest.json")
    taken = len(losses_of(folder / "runs" / KILLED))  # by processes that were killed
    with Controller(folder, num_processes=2) as controller:
        controller.start([RESUMED])
        left = STEPS_OF_TWO - SAVED_STEP
        controller.measure(folder, [RESUMED], rounds=left - 1, warm_up=0, strategy=RESUMED_UNDER)
    for strategy, num_processes in tensor_parallel.items():
        with Controller(folder, num_processes=num_processes) as controller:
            controller.start([OURS])
            controller.measure(folder, [OURS], rounds=STEPS_OF_TWO - 1, warm_up=0, strategy=strategy)
    losses = {name: losses_of(folder / "runs" / name) for name in (*strategies, KILLED, *tensor_parallel)}
    expected = dict.fromkeys((*strategies, KILLED), reference[:STEPS_OF_TWO])
    expected |= {name: losses[NEW_ADAPTER] for name in tensor_parallel if name != NEW_ADAPTER}
    apart = {name: relative_difference(losses[name], each) for name, each in expected.items()}
    log("strategies: " + ", ".join(f"{name} {most:.1e}" for name, most in apart.items()))
    killed = {"strategy": KILLED, "taken": taken, "resumed_from": SAVED_STEP, "resumed_under": RESUMED_UNDER}
    return {"losses": losses, "differences": apart, "killed": killed}


def losses_of(run: Path) -> list[float]:
    """Return the loss of every step, the last word about it where it was taken twice."""
    taken = [event for event in read_events(run / "events.jsonl") if event["event"] == "StepTaken"]
    return list({event["step"]: event["loss"] for event in taken}.values())


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAITS_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.1)
