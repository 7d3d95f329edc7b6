"""Adapters, quantization and new tokens that a strategy does not support: refused before anything is loaded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.config.run_config import RunConfig
from finetune.errors import StrategyError


def require_supported_by_strategy(config: RunConfig, strategy: str) -> None:
    """Raise StrategyError with upstream's reason where what the job trains cannot be trained under the strategy."""
    for limit in _LIMITS:
        if strategy in limit.strategies and limit.holds(config):
            raise StrategyError(f"{limit.key} does not work under {strategy}: {limit.reason}")


def require_tied_weights_supported(model: Any, strategy: str) -> None:
    """Raise StrategyError where adapters stand on one of two tied weights, which Accelerate cannot tie anew under FSDP.

    `fsdp2_prepare_model` of accelerate 1.15 calls `tie_weights` after peft has wrapped the module: KeyError.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for tied in getattr(base, "all_tied_weights_keys", {}):
        module, _, own = tied.rpartition(".")
        if strategy in _FSDP and own not in base.get_submodule(module)._parameters:
            raise StrategyError(
                f"an adapter, or a copy that is trained in full, on the tied weight `{module}` does not work under "
                f"{strategy}: Accelerate ties weights anew by the base's names, and peft's wrapper has changed them "
                "(fsdp2_prepare_model of accelerate 1.15). Launch with accelerate_configs/zero2.yaml or ddp.yaml, or "
                f"leave `{module}` out of `model.lora.target_modules` and `modules_to_save`."
            )


@dataclass(frozen=True)
class _Limit:
    key: str
    strategies: tuple[str, ...]
    holds: Callable[[RunConfig], bool]
    reason: str  # with what to write instead


def _trains_new_tokens(config: RunConfig) -> bool:
    """Tell whether peft trains the rows of new tokens beside adapters; rows of modules trained in full are theirs."""
    return config.model.new_tokens is not None and config.model.lora is not None


def _is_quantized(config: RunConfig) -> bool:
    return config.model.quantization is not None


def _is_not_4bit_bitsandbytes(config: RunConfig) -> bool:
    quantization = config.model.quantization
    return quantization is not None and (quantization.method, quantization.bits) != ("bitsandbytes", 4)


_FSDP = ("fsdp1", "fsdp2", "hsdp")

_LIMITS = (
    _Limit(
        "model.new_tokens with model.lora",
        ("zero3",),
        _trains_new_tokens,
        "peft trains rows of an embedding by reading its whole weight, which ZeRO-3 has split (TrainableTokensLayer of "
        "peft 0.21). Launch with accelerate_configs/zero2.yaml or ddp.yaml, or train all weights.",
    ),
    _Limit(
        "model.new_tokens with model.lora",
        _FSDP,
        _trains_new_tokens,
        "Accelerate ties weights anew by the base's names, and peft's wrapper around the embedding has changed them "
        "(fsdp2_prepare_model of accelerate 1.15). Launch with accelerate_configs/zero2.yaml or ddp.yaml, or train all "
        "weights.",
    ),
    _Limit(
        "model.quantization",
        ("zero3",),
        _is_quantized,
        "its partitioning at birth does not support quantised weights, so every rank would hold the whole base first "
        "(https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1249). Launch with "
        "accelerate_configs/zero2.yaml or fsdp2.yaml.",
    ),
    _Limit(
        "model.quantization of any kind but 4 bits of bitsandbytes",
        _FSDP,
        _is_not_4bit_bitsandbytes,
        "FSDP splits nothing but floating-point numbers, and only 4-bit weights of bitsandbytes can be stored as such "
        "(https://huggingface.co/docs/bitsandbytes/main/fsdp_qlora). Write `bits: 4`, or launch with ddp.yaml.",
    ),
)
