"""What the balance loss of a whole step costs, with one microbatch and with several.

    python benchmarks/experiments/router_loss.py [--rounds 9]

Forward and backward passes of a step of a Qwen3-MoE (4 layers of 32 experts, 8 for each token, hidden size 256,
vocabulary 8,192) on 8 samples of 128 tokens, with and without `train.router_aux_loss`, in an order that is shuffled
each round. CPU-seconds of one thread; ratios are medians of those of the same round.
"""

import argparse
import random
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.task.causal_lm import CausalTask
from finetune.task.protocol import TaskContext
from finetune.task.router_loss.loss import RoutedTask, RoutingRecorder
from finetune.task.router_loss.routers import find_routers
from finetune.train.parts import StepTask

VOCABULARY, SAMPLES, LENGTH = 8192, 8, 128
CUTS = (1, 2, 4)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, task = _model(), _task()
    recorder = RoutingRecorder(model, find_routers(model))
    routed = RoutedTask(task, recorder, 0.001, lambda batch: None)
    counted = RoutedTask(task, recorder, None, lambda batch: None)
    columns = ("microbatches", "without, ms", "expert_load / without", "router_aux_loss / without")
    table = Table(*columns, title=f"A step with the balance loss, CPU-seconds, {options.rounds} rounds")
    for num_batches in CUTS:
        group = _group(task, num_batches=num_batches)
        calls = [_step(each, model, group) for each in (task, counted, routed)]
        without, *others = _measured(calls, rounds=options.rounds)
        ratios = [median(one / own for one, own in zip(other, without, strict=True)) for other in others]
        table.add_row(str(num_batches), f"{1e3 * median(without):.0f}", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


def _model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
        moe_intermediate_size=96,
    )
    return Qwen3MoeForCausalLM(config).train()


def _task() -> CausalTask:
    data = DataSection(train=TrainingSourceSection(path="rows.jsonl"))
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    return CausalTask(TaskContext(TaskSection(name="pretrain"), data, tokenizer))


def _group(task: CausalTask, *, num_batches: int) -> list[Batch]:
    draw, size = np.random.default_rng(0), SAMPLES // num_batches
    rows = [
        Features({"input_ids": draw.integers(1, VOCABULARY, LENGTH), "is_target": np.ones(LENGTH, bool)}, number)
        for number in range(SAMPLES)
    ]
    return [task.collate(rows[start : start + size]) for start in range(0, SAMPLES, size)]


def _step(task: StepTask, model: torch.nn.Module, group: list[Batch]) -> Callable[[], None]:
    def take() -> None:
        for batch in task.prepare_step(model, group):
            task.loss_sums(model, batch)["loss_sum"].backward()  # type: ignore[no-untyped-call]  # torch has no types
        model.zero_grad()

    return take


def _measured(calls: list[Callable[[], None]], *, rounds: int) -> list[list[float]]:
    """Return the seconds of each round of each call."""
    seconds: list[list[float]] = [[] for _ in calls]
    draw, places = random.Random(1), list(range(len(calls)))
    for call in calls:
        call()
    for _ in range(rounds):
        draw.shuffle(places)
        for place in places:
            started = time.process_time()
            calls[place]()
            seconds[place].append(time.process_time() - started)
    return seconds


if __name__ == "__main__":
    main()
