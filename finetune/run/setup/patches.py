"""The forward pass of a job's model: fused, in 8 bits, compiled or with noise as the job says; its FLOPs per token.

Chowdhery et al. (2022, arXiv:2204.02311), appendix B: 6 N + 12 L H Q T per token; a third is the forward pass.
What gradient checkpointing computes again is not counted: the utilization is the model's, not the hardware's. With it
belong the peak of the devices and their price.

Noise on the embeddings is that of NEFTune (Jain et al., 2023, arXiv:2310.05914), uniform. A sample's noise is a
function of the step's seed and the sample's id: it depends neither on the number of processes nor on how the global
batch is split, and a resumed run draws the same noise.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from finetune.config.rules.model import compile_fits_the_model
from finetune.config.run_config import RunConfig
from finetune.config.sections.model import ModelSection
from finetune.config.sections.train import Fp8Section, TrainSection
from finetune.data.batch import Batch
from finetune.data.order.order import DatasetView
from finetune.errors import ModelError, UserError
from finetune.model.kernels import float8, fused_layers
from finetune.model.kernels.compilation import (
    compile_model,
    estimate_compilation,
    repeated_layers,
    why_not_compilable,
)
from finetune.model.kernels.float8 import casts_frozen_weights
from finetune.model.size import read_shapes
from finetune.model.upstream import is_grouped, missing_grouped_kernel
from finetune.registry.model_choices import ARITHMETIC
from finetune.report.reporter import RunLog
from finetune.runtime.gpus import find_gpu, lowest, prices_of
from finetune.runtime.parameters import num_values
from finetune.runtime.seeds import derive_seed
from finetune.strategy.protocol import Strategy
from finetune.task.lm_loss import chunked_loss
from finetune.train.plan import StepPlan


def replace_forwards(
    model: Any,
    config: RunConfig,
    strategy: Strategy,
    training: DatasetView,
    plan: StepPlan | None,
    *,
    device: torch.device,
    log: RunLog,
) -> None:
    """Fuse layers, convert them to 8-bit products and compile them, as the job says; raises UserError if impossible."""
    missing = missing_grouped_kernel(device, precision=config.train.precision)
    if missing is not None and any(map(is_grouped, model.modules())):
        log(
            "warning: the products of experts run one after the other, and in every layer the host waits for the GPU: "
            f"one kernel for all of them needs {missing}."
        )
    if strategy.expected.tensor_size > 1:
        return  # the config's rules refuse keys that would replace a forward pass
    compiled = _chosen_compilation(config, model, strategy, training, plan, log=log)
    _fuse_layers(model, config.model, compiled=compiled, device_type=device.type, log=log)
    casts_frozen = casts_frozen_weights(config.train, strategy=strategy.name, compiled=compiled)
    _convert_to_float8(model, config.train, casts_frozen=casts_frozen, device=device, log=log)
    if compiled != "off" and strategy.name == "zero3":
        log(
            f"warning: model.compile: {compiled} has no effect under ZeRO-3, which gathers parameters in hooks of "
            "every module, and each of them breaks the compiled graph. To compile, launch with fsdp2.yaml."
        )
    elif compiled != "off":  # before a strategy wraps or shards the model
        compile_model(model, compiled, log=log)


def _chosen_compilation(
    config: RunConfig, model: Any, strategy: Strategy, training: DatasetView, plan: StepPlan | None, *, log: RunLog
) -> Literal["off", "regional", "full"]:
    """Return the job's choice, or for `auto` the faster one, which is logged; each rank estimates for its own GPU."""
    if config.model.compile != "auto":
        return config.model.compile
    if plan is None:
        return "off"
    gpu = find_gpu(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    shapes, estimate = read_shapes(model.config), None
    if gpu is not None and shapes is not None:
        estimate = estimate_compilation(
            shapes,
            gpu,
            num_tokens=plan.num_steps * plan.global_batch_size * mean_tokens_per_position(training, plan) / plan.world,
            item_bytes=4 if config.train.precision == "fp32" else 2,
            recomputes=bool(config.model.gradient_checkpointing),
            num_kinds=len({type(layer) for layer in repeated_layers(model)}),
        )
    reason = _why_not_compiled(config, strategy, plan, has_gpu=torch.cuda.is_available())
    if reason is None and estimate is None:
        reason = "the GPU is not in the table, or the model's shapes are not known"
    mode: Literal["off", "regional"] = (
        "regional" if reason is None and estimate is not None and estimate.pays else "off"
    )
    log(f"model.compile: auto: {mode}, since {reason or f'in {plan.num_steps:,} steps {estimate}'}")
    return mode


def _why_not_compiled(config: RunConfig, strategy: Strategy, plan: StepPlan, *, has_gpu: bool) -> str | None:
    """Return why `model.compile: auto` compiles nothing in this run, however long it is; None if it may."""
    if not has_gpu:
        return "this run has no GPU"
    if strategy.name == "zero3" or plan.sequence_size > 1:
        return f"{strategy.name if plan.sequence_size == 1 else 'splitting rows over ranks'} breaks the compiled graph"
    compiled = config.model_copy(update={"model": config.model.model_copy(update={"compile": "regional"})})
    problems = list(compile_fits_the_model(compiled))
    if problems:
        return f"of another key: {problems[0].key}: {problems[0].message}"
    is_wanted = fused_layers.are_wanted(config.model, compiled="off")
    if is_wanted and (config.model.kernels == "liger" or fused_layers.missing_kernel_requirement("cuda") is None):
        return "the kernels of liger-kernel fuse the same layers (`model.kernels`)"
    return why_not_compilable()


def _fuse_layers(model: Any, section: ModelSection, *, compiled: str, device_type: str, log: RunLog) -> None:
    """Use the fused kernels that the job names, and log where; raises UserError if there are none to use."""
    chunked_loss.fuse_chunks(None)
    is_required, missing = section.kernels == "liger", fused_layers.missing_kernel_requirement(device_type)
    if is_required and missing is not None:
        raise UserError(f"model.kernels: `liger` needs {missing}. Write `auto`, or remove the key.")
    if not fused_layers.are_wanted(section, compiled=compiled):
        return
    if missing is not None:
        if device_type == "cuda":
            log(f"warning: model.kernels: no fused kernels are used, which need {missing}")
        return
    counts = fused_layers.fuse_layers(model, fuses_rotary=section.gradient_checkpointing != "selective")
    has_loss = chunked_loss.fuse_chunks(device_type)
    if counts:
        names = [f"{name} ({count})" for name, count in counts.items()] + ["chunks of the loss"] * has_loss
        log(f"kernels of liger-kernel: {', '.join(names)}")
    elif is_required:
        raise UserError(
            f"model.kernels: no layer of `{model.config.model_type}` computes what a kernel of liger-kernel computes. "
            "Write `auto`, or remove the key."
        )


def _convert_to_float8(
    model: Any, train: TrainSection, *, casts_frozen: bool, device: torch.device, log: RunLog
) -> None:
    """Make linear layers multiply in 8 bits where the job says so; raises UserError where the device cannot."""
    if train.precision != "fp8":
        return
    section = train.fp8 or Fp8Section()
    if (missing := float8.missing_fp8_requirement(device, section)) is not None:
        raise UserError(f"train.precision: `fp8` needs {missing}. Write `bf16`.")
    count = float8.convert_linear_layers(model, section, casts_frozen=casts_frozen)
    if not count:
        raise UserError(
            f"train.precision: `fp8` finds no linear layer in the body of `{model.config.model_type}` whose sides are "
            "multiples of 16. Write `bf16`."
        )
    emulated = ", emulated" if section.emulate else ""
    log(f"fp8: {count} linear layers multiply in 8 bits while they train ({section.recipe}{emulated})")


_EXPERTS = ".experts."
"""In the name of a parameter of experts: a token passes only its own experts' part."""

_SEEN_POSITIONS = 256
"""At the start of the data, whose samples stand for all."""


def flops_per_token(model: nn.Module, *, attended: float) -> float | None:
    """Return the FLOPs of one trained token of `model`, whose tokens attend over `attended` tokens on average.

    2 per weight in the forward pass, 2 for the gradient of its input, and 2 for its own gradient if it is trained:
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
    expert_share = 1.0  # of the routed experts that compute one token
    if any(_EXPERTS in name for name, _ in model.named_parameters()):
        text = config.get_text_config(decoder=True)
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        total = next((count for name in names if isinstance(count := getattr(text, name, None), int) and count), 1)
        expert_share = (getattr(text, "num_experts_per_tok", None) or total) / total
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up:
            continue
        size = num_values(parameter) * (expert_share if _EXPERTS in name else 1.0)
        multiplied += size
        trained += size if parameter.requires_grad else 0.0
    return 4 * multiplied + 2 * trained + 12 * shapes.layers * shapes.queries * attended


def attended_tokens(training: DatasetView, plan: StepPlan) -> float:
    """Return the length of the sample that a token is in, on average over the tokens of the first positions."""
    lengths, _ = _first_lengths(training, plan)
    return float((lengths**2).sum() / max(1.0, lengths.sum()))


def mean_tokens_per_position(training: DatasetView, plan: StepPlan) -> float:
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


def require_input_embeddings(model: Any) -> nn.Module:
    """Return the model's input embeddings, the encoder's if there is one; raises ModelError for none."""
    try:
        is_pair = getattr(model.config, "is_encoder_decoder", False)
        embeddings = (model.get_encoder() if is_pair else model).get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embeddings = None
    if not isinstance(embeddings, nn.Module):
        raise ModelError(f"train.embedding_noise: {type(model).__name__} has no input embeddings. Remove it.")
    return embeddings


def add_embedding_noise(model: Any, *, alpha: float) -> Callable[[Batch], None]:
    """Add noise to the input embeddings of each batch that the returned function is called with before its forward.

    Raises ModelError for a model without input embeddings; `model` may be wrapped afterwards.
    """
    noise = EmbeddingNoise(alpha)
    require_input_embeddings(model).register_forward_hook(noise.add)
    return noise.set_batch


class EmbeddingNoise:
    """Adds noise to the next output of the model's input embeddings once a batch has been set."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self._batch: Batch | None = None

    def set_batch(self, batch: Batch) -> None:
        """Set the next training batch; without one, as in evaluations, no noise is added.

        Raises ModelError if the model did not call its input embeddings for the previous batch.
        """
        if self._batch is not None:
            raise ModelError(
                "train.embedding_noise: this model does not call its input embeddings, so it gets no noise. Remove it."
            )
        self._batch = batch

    def add(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        """Return the output with the noise of the batch that was set, as a forward hook of the embeddings."""
        batch, self._batch = self._batch, None  # a decoder that shares the module with its encoder gets none
        return output if batch is None else output + sample_noise(batch, output, alpha=self._alpha)


@torch.no_grad()
def sample_noise(batch: Batch, embedded: Tensor, *, alpha: float) -> Tensor:
    """Return the noise of the samples, [batch, length, width] like `embedded`; padding has none.

    A sample with L tokens of width d gets uniform values in alpha / sqrt(L * d) * [-1, 1).
    """
    noise = torch.zeros_like(embedded)
    width = embedded.shape[-1]
    is_row = batch.cumulative_lengths is not None
    start = 0
    for row, (sample_id, length) in enumerate(zip(batch.sample_ids, batch.lengths, strict=True)):
        target = noise[0, start:] if is_row else noise[row]
        generator = torch.Generator(noise.device).manual_seed(derive_seed(batch.seed, "embedding noise", sample_id))
        drawn = torch.rand((length, width), generator=generator, device=noise.device, dtype=torch.float32)
        target[:length] = ((2.0 * drawn - 1.0) * (alpha / math.sqrt(length * width))).to(noise.dtype)
        start += length
    return noise
