"""Models with random weights that are created on the device: on a CPU, 8 billion of them take minutes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from gpu_comparison.cases import Workload
from gpu_comparison.shapes import Shape

SCALE = 0.02
LORA_ALPHA = 32
LEARNING_RATE = 1e-5


def build(shape: Shape, workload: Workload, device: torch.device) -> Any:
    """Return the model for everybody but ours, in training mode; adapters are float32."""
    config = AutoConfig.for_model(shape.model_type, **shape.values())
    dtype = getattr(torch, workload.dtype)
    with created_on(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    draw(model)
    model.config.use_cache = False
    if workload.lora_rank:
        settings = {"r": workload.lora_rank, "lora_alpha": LORA_ALPHA, "target_modules": workload.lora_targets}
        model = get_peft_model(model, LoraConfig(**settings, task_type="CAUSAL_LM"))
    return model.to(device).train()


@contextmanager
def created_on(device: torch.device) -> Iterator[None]:
    """Create modules on the device without drawing their weights, which `draw` does."""
    skipped = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    with torch.device(device) if device.type != "cpu" else nullcontext():
        originals = {name: getattr(nn.init, name) for name in skipped}
        for name in skipped:
            setattr(nn.init, name, lambda tensor, *_, **__: tensor)
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(nn.init, name, original)


@torch.no_grad()
def draw(
    model: nn.Module, gather: Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]] = nullcontext
) -> None:
    """Fill matrices at random, scales of norms with ones, biases with zeros, on their device.

    `gather` makes those whole that a strategy has split.
    """
    for name, weight in model.named_parameters():
        with gather([weight]):
            if weight.dim() > 1:
                weight.normal_(std=SCALE)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
