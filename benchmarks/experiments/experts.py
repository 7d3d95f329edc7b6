"""What the experts of one layer cost under each implementation of transformers, and by how much their results differ.

    python benchmarks/experiments/experts.py [--rounds 15] [--quick]

Forward and backward pass of the experts of one Qwen3-MoE layer (float32; SwiGLU) on tokens that are sent to experts at
random; one call of every competitor a round in an order that is shuffled each time. CPU-seconds of one thread; ratios
are medians of those of the same round. `batched_mm` copies an expert's weights for every token that is sent to it, so
it is left out where that takes more than 2 GB.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
MAX_COPIED_BYTES = 2 * 10**9


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer of experts."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int


LAYERS = (
    Layer("8 experts, as Mixtral's by a sixteenth", 8, 2, 256, 896),
    Layer("32 experts, as gpt-oss's by a sixth", 32, 4, 480, 480),
    Layer("64 experts, as OLMoE's by a quarter", 64, 8, 512, 256),
    Layer("128 experts, as Qwen3-30B-A3B's by a quarter", 128, 8, 512, 192),
)
TOKENS, QUICK_TOKENS = (64, 512, 4096), (64, 512)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help=f"at most {max(QUICK_TOKENS)} tokens, 5 rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("layer", "tokens", "grouped_mm, ms", "eager / grouped_mm", "batched_mm / grouped_mm", "difference")
    rounds = 5 if options.quick else options.rounds
    table = Table(*columns, title=f"Experts forward and backward, CPU-seconds, {rounds} rounds")
    for layer, tokens in _cases(QUICK_TOKENS if options.quick else TOKENS):
        seconds, difference = _measured(layer, tokens, rounds=rounds)
        table.add_row(
            layer.name,
            str(tokens),
            f"{1e3 * median(seconds['grouped_mm']):.1f}",
            *(_ratio(seconds, name) for name in ("eager", "batched_mm")),
            f"{difference:.0e}",
        )
    Console().print(table)


def _cases(tokens: tuple[int, ...]) -> Iterator[tuple[Layer, int]]:
    for layer in LAYERS:
        for count in tokens:
            yield layer, count


def _ratio(seconds: Mapping[str, list[float]], name: str) -> str:
    if name not in seconds:
        return "-"
    return f"{median(one / own for one, own in zip(seconds[name], seconds['grouped_mm'], strict=True)):.2f}"


def _measured(layer: Layer, tokens: int, *, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each round, and the largest relative difference of a gradient from eager's."""
    experts, inputs = _experts(layer), _inputs(layer, tokens)
    names = [
        each for each in IMPLEMENTATIONS if each != "batched_mm" or _copied_bytes(layer, tokens) < MAX_COPIED_BYTES
    ]
    calls = {name: _call(experts, inputs, name) for name in names}
    wanted, *others = (torch.cat([part.flatten() for part in call()]) for call in calls.values())
    difference = max(float((other - wanted).norm() / wanted.norm()) for other in others)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    draw = random.Random(1)
    for _ in range(rounds):
        draw.shuffle(names)
        for name in names:
            started = time.process_time()
            calls[name]()
            seconds[name].append(time.process_time() - started)
    return seconds, difference


def _experts(layer: Layer) -> nn.Module:
    config = Qwen3MoeConfig(
        num_experts=layer.num_experts,
        num_experts_per_tok=layer.top_k,
        hidden_size=layer.hidden,
        moe_intermediate_size=layer.intermediate,
    )
    experts: nn.Module = Qwen3MoeExperts(config)
    draw = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.05, generator=draw)
    return experts


def _inputs(layer: Layer, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, layer.hidden, generator=draw).requires_grad_()
    weights, chosen = torch.randn(tokens, layer.num_experts, generator=draw).softmax(dim=-1).topk(layer.top_k)
    return hidden, chosen, weights.requires_grad_()


def _call(experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor], name: str) -> Callable[[], tuple[Tensor, ...]]:
    hidden, chosen, weights = inputs
    differentiated = (hidden, weights, *experts.parameters())

    def call() -> tuple[Tensor, ...]:
        experts.config._experts_implementation = name  # type: ignore[union-attr]  # transformers reads it at each call
        return torch.autograd.grad(experts(hidden, chosen, weights).square().sum(), differentiated)

    return call


def _copied_bytes(layer: Layer, tokens: int) -> int:
    return 4 * tokens * layer.top_k * 3 * layer.hidden * layer.intermediate


if __name__ == "__main__":
    main()
