"""What it gives to ask the head at targets alone, and to take its loss slab by slab.

    python benchmarks/head.py [--rounds 9] [--vocabularies 8192,65536] [--threads 1]

A small Llama learns from padded batches of random tokens. Contestants, one step each a round in an order that is
shuffled every time: `plain` (the logits of all positions), `targets` (those of the targets, all at once) and `slabs`
(ours, `train.loss_kernel: chunked`). Milliseconds of CPU a step (medians), the median of each round's ratio to plain
with its quartiles, and how far the resident memory rises above that before the step, each in a process of its own.
The second table is about how many rows a slab has.
"""

import argparse
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.task import slabs
from finetune.task.at_targets import logits_at_targets
from finetune.task.collate import padded
from finetune.task.losses import TokenLoss, cross_entropy_sum
from finetune.task.target_loss import TargetLoss

CONTESTANTS = ("plain", "targets", "slabs")
SHARES = (0.3, 0.6, 1.0)
ROWS = (32, 64, 128, 256, 512, 1024)


def main() -> None:
    """Print both tables, or, in a process of its own, how far the memory of one step rises."""
    options = _options()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(_rise(options.peak, vocabulary=int(options.vocabularies), share=options.share))
        return
    vocabularies = [int(each) for each in options.vocabularies.split(",")]
    _print_contestants(vocabularies, rounds=options.rounds)
    _print_rows(vocabularies, rounds=options.rounds)


def _print_contestants(vocabularies: list[int], *, rounds: int) -> None:
    names = ("vocabulary", "targets", "contestant", "ms a step", "times as fast", "quartiles", "memory rises by")
    table = _table("a step of a Llama of 2 x 256, 8 samples of 128 tokens", names)
    for vocabulary in vocabularies:
        model = _model(vocabulary)
        for share in SHARES:
            batch = _batch(vocabulary, share)
            seconds = _timed({name: partial(_step, name, model, batch) for name in CONTESTANTS}, rounds=rounds)
            for name in CONTESTANTS:
                rise = f"{_rise_apart(name, vocabulary=vocabulary, share=share):,.0f} MB"
                table.add_row(f"{vocabulary:,}", f"{share:.0%}", name, *_figures(seconds, name), rise)
    Console(width=120).print(table)


def _print_rows(vocabularies: list[int], *, rounds: int) -> None:
    table = _table(
        "the same at 60% targets, by rows of a slab", ("vocabulary", "rows", "ms a step", "times", "quartiles")
    )
    for vocabulary in vocabularies:
        model, batch = _model(vocabulary), _batch(vocabulary, 0.6)
        steps: dict[str, Callable[[], None]] = {"plain": partial(_step, "plain", model, batch)}
        steps |= {str(rows): partial(_step_in_slabs, model, batch, rows) for rows in ROWS}
        seconds = _timed(steps, rounds=rounds)
        for rows in ROWS:
            table.add_row(f"{vocabulary:,}", str(rows), *_figures(seconds, str(rows)))
    Console(width=120).print(table)


def _model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes))


def _batch(vocabulary: int, share: float) -> Batch:
    draw = np.random.default_rng(1)
    ids = [draw.integers(0, vocabulary, 128).astype(np.uint32) for _ in range(8)]
    return padded([Features({"input_ids": each, "is_target": draw.random(128) < share}) for each in ids], pad_id=0)


def _step(name: str, model: LlamaForCausalLM, batch: Batch) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    if name == "targets":
        assert batch.targets is not None
        loss = cross_entropy_sum(logits_at_targets(model, batch), batch.targets.labels)
    else:
        loss = TargetLoss(TokenLoss(), "plain" if name == "plain" else "chunked").sums(model, batch)["loss_sum"]
    (loss / batch.num_targets).backward()


def _step_in_slabs(model: LlamaForCausalLM, batch: Batch, rows: int) -> None:
    kept = slabs.LEAST_ROWS, slabs.MOST_ROWS["cpu"]
    slabs.LEAST_ROWS = slabs.MOST_ROWS["cpu"] = rows
    try:
        _step("slabs", model, batch)
    finally:
        slabs.LEAST_ROWS, slabs.MOST_ROWS["cpu"] = kept


def _timed(steps: dict[str, Callable[[], None]], *, rounds: int) -> dict[str, list[float]]:
    """Return CPU-seconds of every step by contestant; the first round of all is not counted."""
    chance = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in chance.sample(list(steps), len(steps)):
            started = time.process_time()
            steps[name]()
            if number:
                seconds[name].append(time.process_time() - started)
    return seconds


def _figures(seconds: dict[str, list[float]], name: str) -> tuple[str, str, str]:
    ratios = [plain / own for plain, own in zip(seconds["plain"], seconds[name], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{1000 * statistics.median(seconds[name]):,.0f}", f"{middle:.2f}", f"{low:.2f}-{high:.2f}"


def _rise(name: str, *, vocabulary: int, share: float) -> float:
    """Return by how many MB the peak of the resident memory lies above what model and gradients need."""
    model, batch = _model(vocabulary), _batch(vocabulary, share)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = _resident("VmRSS")
    _step(name, model, batch)
    return (_resident("VmHWM") - before) / 1000


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def _rise_apart(name: str, *, vocabulary: int, share: float) -> float:
    settings = ("--peak", name, "--vocabularies", str(vocabulary), "--share", str(share))
    command = [sys.executable, __file__, *settings]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _table(title: str, names: tuple[str, ...]) -> Table:
    table = Table(*names, title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabularies", default="8192,65536")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peak", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.6, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
