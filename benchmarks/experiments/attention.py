"""What attention over one row of samples costs: ours sample by sample, transformers' with a block mask, and padded.

    python benchmarks/experiments/attention.py [--rounds 25] [--quick]

Forward and backward pass of one attention layer (8 heads, 4 key heads of 64, float32), the mask included, on rows of
2 to 64 samples whose lengths lie between a half and one and a half of the mean; one call of every competitor a round in
an order that is shuffled each time. CPU-seconds of one thread; ratios are medians of those of the same round.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from finetune.model.attention.causal import AttentionSettings, QueryKeyValue
from finetune.model.attention.implementation import attend_sample_by_sample
from finetune.runtime.packed_rows import SampleLengths

NUM_HEADS, NUM_KEY_HEADS, WIDTH = 8, 4, 64
MEANS, COUNTS = (16, 64, 256, 1024), (2, 8, 32, 64)
MAX_TOKENS, QUICK_TOKENS = 4096, 1024


class Layer(nn.Module):
    """What transformers asks of the layer that attends."""

    num_key_value_groups = NUM_HEADS // NUM_KEY_HEADS
    is_causal = True


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help=f"rows of at most {QUICK_TOKENS:,} tokens, 5 rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    most, rounds = (QUICK_TOKENS, 5) if options.quick else (MAX_TOKENS, options.rounds)
    columns = ("samples", "mean length", "tokens", "ours, ms", "block mask / ours", "padded / ours")
    table = Table(*columns, title=f"Attention forward and backward, CPU-seconds, {rounds} rounds")
    for lengths, mean in _rows(most):
        ours, masked, padded = _measured(lengths, rounds=rounds)
        ratios = [median(one / own for one, own in zip(other, ours, strict=True)) for other in (masked, padded)]
        table.add_row(
            str(len(lengths)), str(mean), str(sum(lengths)), f"{1e3 * median(ours):.2f}", *(f"{r:.2f}" for r in ratios)
        )
    Console().print(table)


def _rows(most: int) -> Iterator[tuple[list[int], int]]:
    draw = random.Random(0)
    for mean in MEANS:
        for count in COUNTS:
            lengths = [max(2, int(mean * draw.uniform(0.5, 1.5))) for _ in range(count)]
            if sum(lengths) <= most:
                yield lengths, mean


def _measured(lengths: list[int], *, rounds: int) -> list[list[float]]:
    """Return the seconds of each round: ours, block mask, padded."""
    competitors: list[Callable[[QueryKeyValue, list[int]], Tensor]] = [_ours, _masked, _padded]
    heads = _heads(lengths)
    outputs = [each(heads, lengths) for each in competitors]
    assert all(torch.allclose(outputs[0], other, atol=1e-5) for other in outputs[1:])
    seconds: list[list[float]] = [[], [], []]
    draw, places = random.Random(1), [0, 1, 2]
    for _ in range(rounds):
        draw.shuffle(places)
        for place in places:
            started = time.process_time()
            torch.autograd.grad(competitors[place](heads, lengths).square().sum(), heads)
            seconds[place].append(time.process_time() - started)
    return seconds


def _heads(lengths: list[int]) -> QueryKeyValue:
    draw, tokens = torch.Generator().manual_seed(0), sum(lengths)
    nums = (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    rows = [torch.randn(1, tokens, num, WIDTH, generator=draw) for num in nums]
    return QueryKeyValue(*(row.transpose(1, 2).requires_grad_() for row in rows))


def _ours(heads: QueryKeyValue, lengths: list[int]) -> Tensor:
    output: Tensor = attend_sample_by_sample(heads, SampleLengths(lengths), AttentionSettings())
    return output


def _masked(heads: QueryKeyValue, lengths: list[int]) -> Tensor:
    """Return what transformers computes where positions are reset within a row."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(sample))
    mask = (sample[:, None] == sample) & (place[:, None] >= place)
    output: Tensor = sdpa_attention_forward(Layer(), *heads, mask[None, None])[0]
    return output


def _padded(heads: QueryKeyValue, lengths: list[int]) -> Tensor:
    """Return the same of a padded batch without a mask, which attention alone on the right padding allows."""
    num, longest = len(lengths), max(lengths)
    places = torch.cat([torch.arange(length) + row * longest for row, length in enumerate(lengths)])

    def rectangle(row: Tensor) -> Tensor:
        filled = row.new_zeros(num * longest, row.shape[1], WIDTH).index_copy(0, places, row[0].transpose(0, 1))
        return filled.view(num, longest, -1, WIDTH).transpose(1, 2)

    query, key, value = map(rectangle, heads)
    output: Tensor = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).reshape(num * longest, NUM_HEADS, WIDTH)[places][None]


if __name__ == "__main__":
    main()
