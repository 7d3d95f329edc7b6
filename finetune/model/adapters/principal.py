"""First values out of the base's weights: what they were, so that the export belongs on the base as it was."""

import copy
from collections.abc import Mapping

import torch
from peft import LoraConfig, PeftModel
from torch import Tensor

from finetune.model.adapters.low_rank import OF_THE_BASE

_KEPT = "_first_factors"


def keep_first_factors(model: PeftModel, init: str) -> None:
    """Remember the factors that were taken out of the base: `W = residual + scale * B0 A0`."""
    if init in OF_THE_BASE:
        factors = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if ".lora_A." in name or ".lora_B." in name
        }
        setattr(model, _KEPT, factors)


def first_factors(model: PeftModel) -> Mapping[str, Tensor]:
    """Return them by parameter name; none where the base is as it was."""
    factors: Mapping[str, Tensor] = getattr(model, _KEPT, {})
    return factors


def as_plain_lora(
    weights: Mapping[str, Tensor], config: LoraConfig, first: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], LoraConfig]:
    """Return factors of twice the rank, and their config, that mean on the original base what these mean on the rest.

    `residual + s B A = W + s (B A - B0 A0) = W + s [B, -B0] [A; A0]` (Meng et al., 2024, arXiv:2404.02948, appendix).
    """
    doubled = dict(weights)
    for name, original in first.items():
        is_a = ".lora_A." in name
        other = original if is_a else -original
        doubled[name] = torch.cat([weights[name], other.to(weights[name])], dim=0 if is_a else 1)
    ratio = 2**0.5 if config.use_rslora else 2.0  # the scale is alpha / rank, or alpha / sqrt(rank)
    return doubled, _doubled(copy.deepcopy(config), ratio)


def _doubled(config: LoraConfig, ratio: float) -> LoraConfig:
    config.init_lora_weights = True
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: ratio * alpha for name, alpha in config.alpha_pattern.items()}
    config.lora_alpha = ratio * config.lora_alpha
    config.r = 2 * config.r
    return config
