"""How long packing takes, how full packs are, and how many tokens a second each way of batching trains on.

    python benchmarks/experiments/packing.py [--samples 1000000] [--budget 4096] [--rounds 25] [--attention per_sample]

Lengths are lognormal (median 200 tokens, sigma 0.9), cut at the budget. The second table trains a small Llama on
samples of random tokens, cut at 512, one microbatch of every competitor a round in an order that is shuffled each
time: tokens that are no padding per second of CPU, as a ratio to padded batches of the same round; medians.
"""

import argparse
import random
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.sections.data import BatchingSection
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.grouping import LengthGroupedOrder, set_order
from finetune.data.order.order import Order
from finetune.model.attention.implementation import register_per_sample
from finetune.registry.attention import PER_SAMPLE_ATTENTION
from finetune.task.lm_loss.token_loss import cross_entropy_sum
from finetune.task.model_inputs import collate_padded, collate_padding_free, forward_logits, is_padding_free

LONGEST, VOCABULARY_SIZE, STEP, MICROBATCH = 512, 4096, 64, 8
COMPETITORS = {
    "padded": (BatchingSection(), MICROBATCH),
    "padded, sorted within a step of 64": (BatchingSection(length_window_steps=1), MICROBATCH),
    "padded, sorted within 16 steps": (BatchingSection(length_window_steps=16), MICROBATCH),
    "batches of 1,024 tokens": (BatchingSection(by="tokens", tokens=1024), 1),
    "padding-free, 8 samples": (BatchingSection(padding_free=True), MICROBATCH),
    "packs of 512": (BatchingSection(by="packs", tokens=512), 1),
    "packs of 1,024": (BatchingSection(by="packs", tokens=1024), 1),
}


def main() -> None:
    """Print both tables."""
    options = _options()
    _print_packing(options.samples, options.budget)
    _print_training(options.rounds, options.attention)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--attention", default=PER_SAMPLE_ATTENTION, choices=(PER_SAMPLE_ATTENTION, "sdpa", "eager"))
    return parser.parse_args()


def _lengths(num_samples: int, longest: int) -> np.ndarray:
    drawn = np.random.default_rng(0).lognormal(np.log(200), 0.9, num_samples)
    return np.clip(drawn, 2, longest).astype(np.int64)


def _print_packing(most: int, budget: int) -> None:
    table = Table("samples", "grouped by", "groups", "full", "seconds", title=f"An epoch in groups of {budget} tokens")
    for num_samples in (most // 100, most // 10, most):
        lengths = _lengths(num_samples, budget)
        eights = lengths[: num_samples // 8 * 8].reshape(-1, 8)
        padding = 1 - eights.sum() / (eights.max(axis=1).sum() * 8)
        table.add_row(f"{num_samples:,}", "eights, padded", f"{num_samples // 8:,}", f"{1 - padding:.1%}", "")
        for by in ("packs", "tokens"):
            started = time.perf_counter()
            batching = BatchingSection(by=by, tokens=budget)
            order = set_order(lengths, seed=0, shuffle=True, batching=batching, max_length=budget)
            assert order.num_positions is not None
            order.samples(0, order.num_positions)
            seconds = time.perf_counter() - started
            full = lengths.sum() / (order.num_positions * budget)
            table.add_row("", by, f"{order.num_positions:,}", f"{full:.2%}", f"{seconds:.2f}")
    Console().print(table)


def _print_training(rounds: int, attention: str) -> None:
    torch.manual_seed(0)
    register_per_sample()
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 3, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=VOCABULARY_SIZE, num_key_value_heads=4, **sizes)
    model = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    batches = {name: _batches(batching, size) for name, (batching, size) in COMPETITORS.items()}
    speeds: dict[str, list[float]] = {name: [] for name in batches}
    shares: dict[str, list[float]] = {name: [] for name in batches}
    draw, names = random.Random(0), list(batches)
    for _ in range(rounds):
        draw.shuffle(names)
        for name in names:
            batch = next(batches[name])
            speeds[name].append(batch.num_tokens / _seconds(model, batch))
            shares[name].append(batch.num_tokens / batch.labels.numel())
    table = Table(
        "batching", "tokens/s against padded", "tokens that are no padding", title=f"{attention}, {rounds} rounds"
    )
    for name in batches:
        ratio = median(one / other for one, other in zip(speeds[name], speeds["padded"], strict=True))
        table.add_row(name, f"{ratio:.2f}", f"{sum(shares[name]) / rounds:.1%}")
    Console().print(table)


def _batches(batching: BatchingSection, size: int) -> Iterator[Batch]:
    """Yield microbatches without end; sample i has the length i of random tokens, all of them targets."""
    lengths = _lengths(4096, LONGEST)
    order: Order = set_order(lengths, seed=1, shuffle=True, batching=batching, max_length=LONGEST)
    steps = batching.length_window_steps
    if steps:
        order = LengthGroupedOrder(order, lengths.__getitem__, seed=1, global_batch_size=STEP, window_steps=steps)
    for ids in order.cut(0, 1 << 40, size):
        samples = [_sample(i, int(lengths[i])) for i in ids.tolist()]
        yield collate_padding_free(samples) if is_padding_free(batching) else collate_padded(samples, pad_id=0)


def _sample(index: int, length: int) -> Features:
    ids = np.random.default_rng(index).integers(0, VOCABULARY_SIZE, length).astype(np.uint32)
    return Features({"input_ids": ids, "is_target": np.ones(length, bool)}, index)


def _seconds(model: LlamaForCausalLM, batch: Batch) -> float:
    started = time.process_time()
    cross_entropy_sum(forward_logits(model, batch), batch.labels).backward()
    model.zero_grad()
    return time.process_time() - started


if __name__ == "__main__":
    main()
