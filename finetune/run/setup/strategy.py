"""The strategy that was launched, and what it does not support: refused before anything is loaded."""

import os
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.config.load import LoadedConfig, require_divisible_batch
from finetune.config.rules.model import adapter_of, trained_dtypes
from finetune.config.run_config import RunConfig
from finetune.data.features import Features
from finetune.data.loader import slice_batch
from finetune.errors import StrategyError
from finetune.model.attention.implementation import SETTING, require_equal_logits, slicing_problem
from finetune.model.loading.architecture import load_model_config
from finetune.model.tensor_parallel import SETTING as TENSOR_SETTING
from finetune.model.tensor_parallel import splitting_problem
from finetune.registry.model_choices import PEFT_TYPES, trainable_types
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.setup.model_problems import resolve_padding_free, why_padded
from finetune.runtime import distributed
from finetune.runtime.parallel import sequence_group
from finetune.strategy.choose import choose_strategy
from finetune.strategy.environment import read_environment, require_launcher, use_fsdp2
from finetune.strategy.launch_file import launch_variables, use_deepspeed_file
from finetune.strategy.protocol import Strategy
from finetune.strategy.reconcile import JobSettings
from finetune.task.model_inputs import collate_row, forward_logits, is_padding_free
from finetune.train.optim.optimizers import uses_low_bit_adamw


def launched_strategy(loaded: LoadedConfig) -> Strategy:
    """Return the strategy that was launched; raises ConfigError or StrategyError if it does not fit the job."""
    require_launcher(os.environ)
    for sentence in (*use_deepspeed_file(), *use_fsdp2(os.environ)):
        RunLog(is_main=os.environ.get("RANK", "0") == "0")(sentence)
    return _strategy(loaded, os.environ, has_device=torch.accelerator.is_available())


def strategy_of_file(loaded: LoadedConfig, accelerate_file: Path, *, num_processes: int | None) -> Strategy:
    """Return the strategy of a launch with the accelerate file, by default on its own number of processes."""
    variables = launch_variables(accelerate_file, world=num_processes)
    use_fsdp2(variables)
    return _strategy(loaded, variables, has_device=variables.get("ACCELERATE_USE_CPU", "false").lower() != "true")


def _strategy(loaded: LoadedConfig, variables: Mapping[str, str], *, has_device: bool) -> Strategy:
    config = loaded.config
    environment = read_environment(variables, has_device=has_device)
    strategy = choose_strategy(environment, job_settings(config))
    require_divisible_batch(loaded, num_processes=strategy.expected.data_parallel_size)
    if environment.sequence_size > 1:
        _require_allowed(
            config, _NOT_IN_SLICES, f"{SETTING} shares the tokens of a row over ranks, which this job does not allow"
        )
    if environment.tensor_size > 1:
        require_splittable_job(config)
    return strategy


def require_splittable_job(config: RunConfig) -> None:
    """Raise StrategyError with everything in the job that tensor parallelism does not support."""
    problem = f"{TENSOR_SETTING} shares the matrices of a layer over ranks, which this job does not allow"
    _require_allowed(config, _NOT_IN_TENSOR_PARALLEL, problem)


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
        emulates_fp8=config.train.fp8 is not None and config.train.fp8.emulate,
        rounds_by_position=any(
            uses_low_bit_adamw(config.train.optimizer, dtype=dtype) for dtype in trained_dtypes(config)
        ),
    )


def require_sliceable_model(config: RunConfig, *, size: int) -> None:
    """Raise StrategyError where `size` ranks cannot share the rows of this job's model exactly."""
    if size == 1:
        return
    model = load_model_config(config.model)
    if (problem := slicing_problem(model, size)) is not None:
        raise StrategyError(f"{SETTING}: {size}: {problem}. Launch without it.")
    if not is_padding_free(resolve_padding_free(config).batching):
        reason = why_padded(config) or "the job writes so"
        raise StrategyError(
            f"{SETTING}: {size}: ranks share rows without padding, and samples are padded here: {reason}. Write "
            "`data.batching.padding_free: auto`, or `by: packs`, or launch without it."
        )


def require_splittable_model(config: RunConfig, *, size: int) -> None:
    """Raise StrategyError where `size` ranks cannot share the layers of this job's model."""
    if size == 1:
        return
    if (problem := splitting_problem(load_model_config(config.model), size)) is not None:
        raise StrategyError(f"{TENSOR_SETTING}: {size}: {problem}. Launch with accelerate_configs/fsdp2.yaml.")


@torch.no_grad()
def require_exact_slices(model: nn.Module, *, config: Any, tokenizer: Sized | None, device: torch.device) -> None:
    """Raise StrategyError unless the ranks of a group give the logits of a whole row; nothing for one rank. Collective.

    Two tiny forward passes; `config` is that of the model inside all wrappers.
    """
    group = sequence_group()
    if group.size == 1 or tokenizer is None:  # a task of images alone shares no rows
        return
    was_training = model.training
    model.eval()
    ids = [np.arange(7 * index, 7 * index + length) % len(tokenizer) for index, length in enumerate((5, 9, 4, 1))]
    samples, labels = [Features({"input_ids": sample}) for sample in ids], np.zeros(sum(map(len, ids)), np.int64)
    row = collate_row(samples, {"input_ids": ids}, token_labels=labels)
    whole = forward_logits(model, row.to(device))[0]
    own = forward_logits(model, slice_batch(row, group).to(device))[0]
    parts = distributed.gather_rows(own, [len(own)] * distributed.world())
    model.train(was_training)
    together = torch.cat(parts[: group.size])[: len(whole)]
    require_equal_logits(whole, together, config=config, size=group.size)


_JobLimits = tuple[tuple[str, Callable[[RunConfig], bool], str], ...]
"""A refused setting of a job: its key, when it applies, and the reason."""


def _require_allowed(config: RunConfig, limits: _JobLimits, problem: str) -> None:
    """Raise StrategyError with everything in the job that is refused."""
    lines = "\n".join(f"  {key}: {reason}" for key, holds, reason in limits if holds(config))
    if lines:
        raise StrategyError(f"{problem}\n{lines}")


_NOT_IN_SLICES: _JobLimits = (
    (
        "task.name",
        lambda config: not TASKS[config.task.name].may_be_sliced,
        "only `pretrain` and `sft` are sums over tokens; others read or compare whole samples, and a rank has a part "
        "of them. Launch without it.",
    ),
    (
        "model.attention",
        lambda config: config.model.attention != "auto",
        "ranks exchange tokens in our own attention. Write `auto`, which calls flash attention's kernel where there "
        "is one.",
    ),
    (
        "model.compile",
        lambda config: config.model.compile in ("regional", "full"),
        "what ranks exchange within a layer breaks its graph. Write `off`.",
    ),
    (
        "train.embedding_noise",
        lambda config: bool(config.train.embedding_noise),
        "the noise is drawn for whole samples. Remove it.",
    ),
    (
        "train.router_aux_loss",
        lambda config: config.train.router_aux_loss is not None,
        "the tokens that even out the slices would be counted. Remove it.",
    ),
    (
        "report.expert_load",
        lambda config: config.report.expert_load,
        "the tokens that even out the slices would be counted. Remove it.",
    ),
)
"""What of a job is not exact in slices."""

_NOT_IN_TENSOR_PARALLEL: _JobLimits = (
    (
        "task.name",
        lambda config: config.task.name not in ("pretrain", "sft", "preference"),
        "only `pretrain`, `sft` and `preference` were compared with one process. Launch with "
        "accelerate_configs/fsdp2.yaml.",
    ),
    (
        "model",
        lambda config: adapter_of(config) not in (None, "lora") or config.model.quantization is not None,
        "quantized weights and adapters other than `lora` are not split. Launch with accelerate_configs/fsdp2.yaml.",
    ),
    (
        "model.lora",
        lambda config: (
            config.model.lora is not None
            and bool(
                config.model.lora.modules_to_save
                or config.model.new_tokens
                or config.model.lora.init not in ("default", "gaussian")
            )
        ),
        "adapters are split without `modules_to_save`, `model.new_tokens` and an `init` from the weights. Leave these "
        "out.",
    ),
    (
        "model.compile, model.kernels",
        lambda config: config.model.compile in ("regional", "full") or config.model.kernels == "liger",
        "a fused or compiled layer would read a rank's part of a weight as all of it. Write `off`.",
    ),
    (
        "model.gradient_checkpointing, model.activation_offload",
        lambda config: config.model.gradient_checkpointing == "selective" or config.model.activation_offload,
        "they choose activations by the operation that made them, which differs here. Write "
        "`gradient_checkpointing: true`.",
    ),
    (
        "train.precision",
        lambda config: config.train.precision in ("fp16", "fp8"),
        "ranks would scale losses or weights differently. Write `bf16`.",
    ),
    (
        "train.optimizer",
        lambda config: (
            config.train.optimizer.name not in ("adamw", "sgd")
            or config.train.optimizer.state_dtype is not None
            or config.train.optimizer.stochastic_rounding
            or config.train.optimizer.in_backward
        ),
        "only plain `adamw` and `sgd` update parts of a matrix as they update all of it. Write one of them.",
    ),
)
"""What of a job tensor parallelism does not support."""


def require_supported_by_strategy(config: RunConfig, strategy: str) -> None:
    """Raise StrategyError with upstream's reason where what the job trains cannot be trained under the strategy."""
    for limit in _LIMITS:
        if strategy in limit.strategies and limit.holds(config):
            raise StrategyError(f"{limit.key} does not work under {strategy}: {limit.reason}")


def require_tied_weights_supported(model: Any, strategy: str) -> None:
    """Raise StrategyError where adapters stand on one of two tied weights, which Accelerate cannot retie under FSDP.

    `fsdp2_prepare_model` of accelerate 1.15 calls `tie_weights` after peft has wrapped the module: KeyError.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for tied in getattr(base, "all_tied_weights_keys", {}):
        module, _, own = tied.rpartition(".")
        if strategy in _FSDP and own not in base.get_submodule(module)._parameters:
            raise StrategyError(
                f"an adapter, or a copy that is trained in full, on the tied weight `{module}` does not work under "
                f"{strategy}: Accelerate ties weights again by the base's names, and peft's wrapper has changed them "
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
    """Return whether peft trains the rows of new tokens next to adapters; modules trained in full own their rows."""
    return config.model.new_tokens is not None and config.model.lora is not None


_FSDP = ("fsdp2", "hsdp")

_ZERO = ("zero1", "zero2", "zero3")


_LIMITS = (
    _Limit(
        "model.peft of this type",
        (*_ZERO, "hsdp"),
        lambda config: (
            (section := config.model.peft) is not None
            and not ((entry := PEFT_TYPES.get(section.type)) and entry.is_proven_everywhere)
        ),
        f"only {', '.join(entry.name for entry in PEFT_TYPES if entry.is_proven_everywhere)} are proven there. Launch "
        "with accelerate_configs/fsdp2.yaml or ddp.yaml, or write `model.lora`.",
    ),
    _Limit(
        "model.peft of this type",
        ("fsdp2",),
        lambda config: (
            (section := config.model.peft) is not None
            and not ((entry := PEFT_TYPES.get(section.type)) and entry.is_proven_sharded)
        ),
        f"only {', '.join(trainable_types())} are proven with sharded weights. Launch with ddp.yaml.",
    ),
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
        "Accelerate ties weights again by the base's names, and peft's wrapper around the embedding has changed them "
        "(fsdp2_prepare_model of accelerate 1.15). Launch with accelerate_configs/zero2.yaml or ddp.yaml, or train all "
        "weights.",
    ),
    _Limit(
        "model.quantization",
        ("zero3",),
        lambda config: config.model.quantization is not None,
        "its partitioning at construction does not support quantized weights, so every rank would hold the whole base "
        "first (https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1249). Launch with "
        "accelerate_configs/zero2.yaml or fsdp2.yaml.",
    ),
    _Limit(
        "model.quantization other than 4-bit bitsandbytes",
        _FSDP,
        lambda config: (
            (section := config.model.quantization) is not None and (section.method, section.bits) != ("bitsandbytes", 4)
        ),
        "FSDP shards only floating-point tensors, and only 4-bit weights of bitsandbytes can be stored as such "
        "(https://huggingface.co/docs/bitsandbytes/main/fsdp_qlora). Write `bits: 4`, or launch with ddp.yaml.",
    ),
)
