"""What model FLOPs utilization (MFU) is computed from: the arithmetic of a trained token, and the peak of the devices.

It also looks up the price of a device.

Chowdhery et al. (2022, arXiv:2204.02311), appendix B: 6 N + 12 L H Q T per token, of which a third is the forward pass.
What gradient checkpointing computes again is not counted: the utilization is the model's, not the hardware's.
"""

from typing import Any

import torch
from torch import nn

from finetune.data.order.order import DatasetView
from finetune.model.size import read_shapes
from finetune.registry.model import ARITHMETIC
from finetune.runtime.gpus import find_gpu, lowest, prices_of
from finetune.runtime.parameters import num_values
from finetune.train.plan import StepPlan

_EXPERTS = ".experts."
"""In the name of a parameter of which a token passes only its own experts' part."""

_SEEN_POSITIONS = 256
"""At the start of the data, whose samples stand for all."""


def flops_per_token(model: nn.Module, *, attended: float) -> float | None:
    """Return the FLOPs of one trained token of `model`, whose tokens attend over `attended` tokens on average.

    2 per weight in the forward pass, 2 for the gradient of its input, and 2 for its own gradient where it is trained:
    6 N for full training, nearly 4 N with adapters on a frozen base. The embedding is looked up, not multiplied, unless
    it is the head as well. The scores of attention take 4 L H Q T, and twice that in the backward pass; as in the paper
    a causal mask saves nothing. Where lower layers are frozen, their share of the backward pass is counted although
    none is computed. None for a model whose tokens do not all pass the same weights: an encoder with a decoder, images.
    """
    config: Any = getattr(model, "config", None)
    shapes = read_shapes(config) if config is not None else None
    if shapes is None or getattr(config, "is_encoder_decoder", False) or hasattr(config, "vision_config"):
        return None
    multiplied = trained = 0.0
    # The parameters of embeddings, except one that is the head's matrix, too.
    heads = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(module.weight) for module in tables} - heads
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up:
            continue
        size = num_values(parameter) * (_expert_share(config) if _EXPERTS in name else 1.0)
        multiplied += size
        trained += size if parameter.requires_grad else 0.0
    return 4 * multiplied + 2 * trained + 12 * shapes.layers * shapes.queries * attended


def attended_tokens(training: DatasetView, plan: StepPlan) -> float:
    """Return the length of the sample that a token is in, on average over the tokens of the first positions.

    Of a stream, whose samples arrive in windows, those are the first microbatch.
    """
    lengths, _ = _first_lengths(training, plan)
    return float((lengths**2).sum() / max(1.0, lengths.sum()))


def tokens_per_position(training: DatasetView, plan: StepPlan) -> float:
    """Return the tokens of a position on average over the first ones; as `attended_tokens` for a stream."""
    lengths, num_positions = _first_lengths(training, plan)
    return float(lengths.sum() / num_positions)


def peak_flops(device: torch.device, *, precision: str, world: int) -> float | None:
    """Return the peak FLOP/s of `world` devices like this one; None on a CPU and for a kind that is in no table.

    That of the dtype in which matrices are multiplied; TF32 where float32 products are allowed to use it. For fp8
    that of bf16, in which head and attention compute, so that utilizations can be compared.
    """
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    uses_tf32 = precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    return world * gpu.peak_flops("tf32" if uses_tf32 else ARITHMETIC[precision].name)


def device_price(device: torch.device, *, stated: float | None) -> dict[str, Any]:
    """Return the price of a device in USD per hour, and its source; empty where unknown, as on a CPU."""
    if stated is not None:
        return {"usd_per_hour": stated, "source": "report.price_per_device_hour"}
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    price = lowest(prices_of(gpu.name), "on_demand") if gpu is not None else None
    if price is None:
        return {}
    return {"usd_per_hour": price.on_demand, "source": f"{price.provider} on demand; {price.source}"}


def _first_lengths(training: DatasetView, plan: StepPlan) -> tuple[Any, int]:
    """Return the lengths of the samples in the first positions, and the number of these."""
    num = min(_SEEN_POSITIONS, plan.num_positions or plan.microbatch_size)
    return training.samples.lengths_of(training.order.samples(0, num)).astype(float), num


def _expert_share(config: Any) -> float:
    """Return the share of the routed experts that compute one token."""
    text = config.get_text_config(decoder=True)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    total = next((count for name in names if isinstance(count := getattr(text, name, None), int) and count), 1)
    return (getattr(text, "num_experts_per_tok", None) or total) / total
