"""What it saves to compute the head at target positions only, and its loss in chunks.

    python benchmarks/experiments/head.py [--rounds 9] [--vocabularies 8192,65536]

A small Llama trains on padded batches of random tokens. Competitors, one step each a round in an order that is shuffled
every time: `plain` (the logits of all positions), `targets` (those of the targets, all at once) and `chunks` (ours,
`train.loss_kernel: chunked`). CPU-milliseconds a step (medians), the median of each round's ratio to plain with its
quartiles, and how far the resident memory rises in a step, each measured in a process of its own.
"""

import argparse
import random
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.task.lm_loss.at_targets import logits_at_targets
from finetune.task.lm_loss.target_loss import TargetLoss
from finetune.task.lm_loss.token_loss import TokenLoss, cross_entropy_sum
from finetune.task.model_inputs import collate_padded

sys.path.append(str(Path(__file__).parents[1]))
from comparison.results import Spread
from comparison.worker import memory_bytes

COMPETITORS = ("plain", "targets", "chunks")
SHARES = (0.3, 0.6, 1.0)


def main() -> None:
    """Print the table, or, in a process of its own, how far the memory of one step rises."""
    options = _options()
    torch.set_num_threads(1)
    vocabularies = [int(each) for each in options.vocabularies.split(",")]
    if options.peak:
        print(_rise(options.peak, vocabularies[0], options.share))
        return
    names = ("vocabulary", "targets", "competitor", "ms a step", "times as fast (quartiles)", "memory rises by")
    table = Table(*names, title="a step of a Llama of 2 x 256, 8 samples of 128 tokens")
    for vocabulary in vocabularies:
        model = _model(vocabulary)
        for share in SHARES:
            seconds = _measured(model, _batch(vocabulary, share), rounds=options.rounds)
            for name in COMPETITORS:
                milliseconds = 1000 * Spread.of(seconds[name]).median
                ratio = Spread.of_ratios(seconds["plain"], seconds[name])
                rise = _rise_in_own_process(name, vocabulary, share)
                table.add_row(
                    f"{vocabulary:,}", f"{share:.0%}", name, f"{milliseconds:,.0f}", str(ratio), f"{rise:,.0f} MB"
                )
    Console(width=120).print(table)


def _model(vocabulary: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes))


def _batch(vocabulary: int, share: float) -> Batch:
    draw = np.random.default_rng(1)
    ids = [draw.integers(0, vocabulary, 128).astype(np.uint32) for _ in range(8)]
    return collate_padded(
        [Features({"input_ids": each, "is_target": draw.random(128) < share}) for each in ids], pad_id=0
    )


def _step(name: str, model: LlamaForCausalLM, batch: Batch) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    if name == "targets":
        assert batch.targets is not None
        loss = cross_entropy_sum(logits_at_targets(model, batch), batch.targets.labels)
    else:
        loss = TargetLoss(TokenLoss(), "plain" if name == "plain" else "chunked").sums(model, batch)["loss_sum"]
    (loss / batch.num_targets).backward()


def _measured(model: LlamaForCausalLM, batch: Batch, *, rounds: int) -> dict[str, list[float]]:
    """Return CPU-seconds of every step by competitor; the first round of all is not counted."""
    draw, steps = random.Random(0), {name: partial(_step, name, model, batch) for name in COMPETITORS}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name in draw.sample(list(steps), len(steps)):
            started = time.process_time()
            steps[name]()
            if number:
                seconds[name].append(time.process_time() - started)
    return seconds


def _rise(name: str, vocabulary: int, share: float) -> float:
    """Return by how many MB the peak of the resident memory lies above what model and gradients need."""
    model, batch = _model(vocabulary), _batch(vocabulary, share)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory_bytes("VmRSS")
    _step(name, model, batch)
    return (memory_bytes("VmHWM") - before) / 1e6


def _rise_in_own_process(name: str, vocabulary: int, share: float) -> float:
    settings = ("--peak", name, "--vocabularies", str(vocabulary), "--share", str(share))
    done = subprocess.run([sys.executable, __file__, *settings], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--vocabularies", default="8192,65536")
    parser.add_argument("--peak", choices=COMPETITORS, help=argparse.SUPPRESS)
    parser.add_argument("--share", type=float, default=0.6, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
