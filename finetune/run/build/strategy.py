"""The strategy that was launched, and what it does not support: refused before anything is loaded."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from finetune.config.load import LoadedConfig, require_divisible_batch
from finetune.config.rules.model import adapter_of, trained_dtypes
from finetune.config.run_config import RunConfig
from finetune.errors import StrategyError
from finetune.strategy.choose import choose_strategy
from finetune.strategy.environment import read_environment
from finetune.strategy.launch_file import require_parallelism_fits
from finetune.strategy.protocol import Strategy
from finetune.strategy.reconcile import JobSettings
from finetune.train.optim.optimizers import uses_low_bit_adamw


def launched_strategy(loaded: LoadedConfig) -> Strategy:
    """Return the strategy that was launched; raises ConfigError or StrategyError where it does not fit the job."""
    config = loaded.config
    environment = read_environment(os.environ, has_device=torch.accelerator.is_available())
    require_parallelism_fits(os.environ)
    require_divisible_batch(loaded, num_processes=environment.world)
    return choose_strategy(environment, job_settings(config))


def job_settings(config: RunConfig) -> JobSettings:
    """Return what a strategy has to know of the job."""
    return JobSettings(
        strategy=config.run.strategy,
        precision=config.train.precision,
        microbatch_size=config.train.known_microbatch_size,
        max_gradient_norm=config.train.max_gradient_norm,
        optimizer=config.train.optimizer.name,
        averages_weights=config.train.average is not None,
        unfreezes_later=bool(config.train.unfreeze),
        pins_memory=config.data.pin_memory is True,
        offloads_activations=config.model.activation_offload,
        updates_in_backward=config.train.optimizer.in_backward,
        rounds_by_position=any(
            uses_low_bit_adamw(config.train.optimizer, dtype=dtype) for dtype in trained_dtypes(config)
        ),
        has_mixed_dtypes=adapter_of(config) is not None and config.model.dtype != "float32",
    )


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
        "model.quantization other than 4-bit bitsandbytes",
        _FSDP,
        _is_not_4bit_bitsandbytes,
        "FSDP splits nothing but floating-point numbers, and only 4-bit weights of bitsandbytes can be stored as such "
        "(https://huggingface.co/docs/bitsandbytes/main/fsdp_qlora). Write `bits: 4`, or launch with ddp.yaml.",
    ),
)
