"""Measure LoRA on routed experts as grouped products next to peft's way, which adds `BA` to the matrices in each pass.

    python benchmarks/adapted_experts.py        # about a minute on one core

Prints a table in Markdown of the forward and backward pass of a model with four layers of experts. `operators`: of
torch, without views and allocations, about the number of kernels that a GPU would launch. `memory`: what tensors
hold at most besides weights. CPU time: the median of the ratios of 9 rounds in which both take turns.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.sections.model import LoraSection
from finetune.memory.step.tracer import Tracer
from finetune.model.adapters import build
from finetune.model.adapters.context import AdapterContext

_NO_KERNEL = ("detach", "empty", "alias", "_unsafe_view", "lift_fresh")
_SHARED = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral, 8 experts, top 2, 256 -> 896": {
        **{"model_type": "mixtral", "hidden_size": 256, "intermediate_size": 896, "num_local_experts": 8},
        "num_experts_per_tok": 2,
    },
    "gpt_oss, 32 experts, top 4, 256 -> 256": {
        **{"model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 256, "num_local_experts": 32},
        **{"num_experts_per_tok": 4, "head_dim": 64},
    },
    "qwen3_moe, 128 experts, top 8, 256 -> 96": {
        **{"model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 128},
        **{"num_experts_per_tok": 8, "head_dim": 64},
    },
}
NUM_TOKENS, NUM_ROUNDS, RANK = 1024, 9, 16


class OperatorCount(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Counts the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        name = operation._schema.name.removeprefix("aten::")
        self.count += not (operation.is_view or name.startswith(_NO_KERNEL))
        return operation(*given, **(named or {}))


@dataclass(frozen=True)
class Measured:
    """One pass, forward and backward."""

    loss: float
    flops: int
    operators: int
    memory: int


def adapted_model(values: dict[str, Any], *, is_grouped: bool) -> PeftModel:
    """Return the same model with the same adapters, with this package's or peft's way of computing them."""
    torch.manual_seed(0)
    types = {name: value for name, value in values.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values["model_type"], **_SHARED, **types))
    with as_peft() if not is_grouped else patch.dict({}):
        adapted = build.add_adapter(model, LoraSection(rank=RANK, alpha=32.0), AdapterContext(seed=1))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return adapted


@contextmanager
def as_peft() -> Iterator[None]:
    """Leave the forward pass of adapters of experts to peft in this context."""
    with patch.object(build, "group_expert_adapters", lambda model: 0):
        yield


def loss_of(model: PeftModel, *, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Return the loss of random tokens, after a backward pass."""
    ids = torch.randint(512, (4, num_tokens // 4), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
    return loss.detach()


def measure(model: PeftModel, *, num_tokens: int = NUM_TOKENS) -> Measured:
    """Return the counts of a pass."""
    with OperatorCount() as operators:
        loss = loss_of(model, num_tokens=num_tokens)
    model.zero_grad()
    with Tracer() as tracer:
        loss_of(model, num_tokens=num_tokens)
    return Measured(float(loss), sum(tracer.flops.values()), operators.count, tracer.peak)


def _time_ratio(ours: PeftModel, theirs: PeftModel) -> float:
    ratios = []
    for number in range(NUM_ROUNDS):
        seconds = {}
        for is_ours in (True, False) if number % 2 else (False, True):
            start = time.process_time()
            loss_of(ours if is_ours else theirs)
            seconds[is_ours] = time.process_time() - start
        ratios.append(seconds[False] / seconds[True])
    return statistics.median(ratios)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{NUM_TOKENS} tokens, rank {RANK}, float32, 4 layers; peft -> grouped.\n")
    print("| experts | GFLOPs | operators | memory, MB | CPU time, peft / grouped | difference of the loss |")
    print("|---|---|---|---|---|---|")
    for name, values in SHAPES.items():
        models = [adapted_model(values, is_grouped=is_grouped) for is_grouped in (False, True)]
        theirs, ours = map(measure, models)
        print(
            f"| {name} | {theirs.flops / 1e9:.1f} -> {ours.flops / 1e9:.1f} | {theirs.operators} -> {ours.operators} | "
            f"{theirs.memory / 1e6:.0f} -> {ours.memory / 1e6:.0f} | {_time_ratio(models[1], models[0]):.2f} | "
            f"{abs(theirs.loss - ours.loss):.0e} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
