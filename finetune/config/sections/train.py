"""`train:` - how the model is trained: batch, budget, optimizer, schedule, precision and when to stop."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from finetune.config.section import (
    MAX_COUNT,
    MAX_FACTOR,
    BatchSize,
    Count,
    Fraction,
    Name,
    OneOf,
    Positive,
    Section,
    Strings,
    key,
)
from finetune.registry.losses import LOSS_KERNELS
from finetune.registry.observers import CALLBACKS
from finetune.registry.optimizers import OPTIMIZERS, SCHEDULES, describe_defaults

DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=MAX_FACTOR)]
DecayRates = Annotated[tuple[DecayRate, ...], Field(strict=False)]
OptimizerName = Annotated[str, OneOf(OPTIMIZERS)]
ScheduleName = Annotated[str, OneOf(SCHEDULES)]
Callbacks = Annotated[tuple[Annotated[str, OneOf(CALLBACKS)], ...], Field(strict=False)]
LossKernel = Annotated[str, OneOf(LOSS_KERNELS)]


class OptimizerSection(Section):
    """The update rule."""

    name: OptimizerName = key(OPTIMIZERS.describe(), "adamw")
    weight_decay: float = key(
        "Decoupled weight decay on matrices; biases, norms and other vectors get none.", 0.0, ge=0.0, le=MAX_FACTOR
    )
    betas: DecayRates = key(
        f"Decay rates of the moments.{describe_defaults('betas')}", (0.9, 0.999), min_length=2, max_length=2
    )
    eps: float = key("Term that keeps AdamW's denominator away from zero.", 1e-8, gt=0.0, le=MAX_FACTOR)
    momentum: float | None = key("Momentum; unset, none for `sgd` and 0.95 for `muon`.", None, ge=0.0, lt=1.0)
    fused: bool | None = key("One kernel for the whole AdamW update; unset, used wherever it exists.", None)
    state_dtype: Literal["float32", "bfloat16", "int8"] | None = key(
        "`adamw`: dtype of the moments; unset, that of the weights. Below 32 bits they are rounded stochastically; "
        "`int8` has one scale per block of at most 256 values (Dettmers et al., 2022, arXiv:2110.02861).",
        None,
    )
    stochastic_rounding: bool = key(
        "`adamw` with `model.dtype: bfloat16`: weights are updated in float32 and rounded stochastically, so that "
        "small updates are not lost although there is no float32 copy.",
        False,
    )
    in_backward: bool = key(
        "Update each parameter as soon as its gradient is computed, then free the gradient (Lv et al., 2023, "
        "arXiv:2306.09782). One process, one microbatch per step, no clipping.",
        False,
    )
    lora_plus_ratio: float = key(
        "LoRA+ (Hayou et al., 2024, arXiv:2402.12354): learning rate of B divided by that of A.",
        1.0,
        gt=0.0,
        le=MAX_FACTOR,
    )
    layer_decay: float = key(
        "Learning rate of each layer as a fraction of the next layer's; the embeddings have the lowest (Howard & "
        "Ruder, 2018, arXiv:1801.06146).",
        1.0,
        gt=0.0,
        le=1.0,
    )
    rates: dict[str, Rate] = key(
        "Factors on the learning rate of parameters by pattern (`fnmatch`): `{'*embed*': 0.1}`; the first "
        "match counts.",
        {},
    )

    @model_validator(mode="before")
    @classmethod
    def _use_own_defaults(cls, values: Any) -> Any:
        """Fill in the defaults of the named optimizer that differ from the section's."""
        name = values.get("name") if isinstance(values, dict) else None
        if not isinstance(name, str) or name not in OPTIMIZERS:
            return values
        return {**OPTIMIZERS[name].defaults, **values}


class ScheduleSection(Section):
    """The learning rate as a function of the step."""

    name: ScheduleName = key(f"Shape after the warmup. {SCHEDULES.describe()}", "cosine")
    warmup_steps: Count | None = key("Steps over which the rate rises linearly from 0.", None)
    warmup_fraction: Fraction | None = key("The same, as a fraction of all steps. At most one of the two.", None)
    decay_fraction: Fraction = key("`warmup_stable_decay`: fraction of all steps in which the rate decays.", 0.2)
    final_fraction: Fraction = key("Rate at the end, as a fraction of the peak rate.", 0.0)


class ScalingSection(Section):
    """Scale the learning rate with the global batch."""

    rule: Literal["linear", "square_root"] = key("`linear` (Goyal et al., 2017, arXiv:1706.02677) or `square_root`.")
    base_global_batch_size: BatchSize = key("Global batch size for which `train.learning_rate` was chosen.")


class EarlyStoppingSection(Section):
    """Stop when an evaluation metric no longer improves."""

    metric: Name = key("Metric of the evaluation, such as `loss` or `exact_match`.", "loss")
    goal: Literal["minimize", "maximize"] = key("Whether a lower or a higher value is better.", "minimize")
    patience: Positive = key("Evaluations without improvement before the run stops.", 3)
    min_delta: float = key("Smallest change that counts as an improvement.", 0.0, ge=0.0, le=MAX_COUNT)


class NonFiniteSection(Section):
    """What to do with a step whose loss or gradient is NaN or infinite; such a step never updates the weights."""

    action: Literal["stop", "skip"] = key("Stop the run, or skip the step and continue.", "stop")
    max_skips: Positive = key("With `skip`: stop after this many skipped steps.", 3)


class UnfreezeSection(Section):
    """Parameters that stay frozen until a later step."""

    patterns: Strings = key("Patterns (`fnmatch`) of their names.", min_length=1)
    after_steps: Positive = key("Number of steps for which they stay frozen.")


class Fp8Section(Section):
    """8-bit products of linear layers (Micikevicius et al., 2022, arXiv:2209.05433)."""

    recipe: Literal["tensorwise", "rowwise"] = key(
        "One scale per tensor, with which FSDP2 gathers weights in 8 bits; or one per row: more exact, less fast. "
        "Frozen weights that are cast once have one per row in any case.",
        "tensorwise",
    )
    emulate: bool = key(
        "Compute the numbers of 8-bit products in 32 bits: on any device, and slower than bf16. For tests.", False
    )


class AverageSection(Section):
    """An exponential moving average of the weights, which is evaluated and exported in their place."""

    decay: float = key("Decay per step: the fraction of the average that is kept.", 0.999, gt=0.0, lt=1.0)
    after_steps: Count = key("Steps before averaging starts.", 0)


Unfreezes = Annotated[tuple[UnfreezeSection, ...], Field(strict=False)]


class TrainSection(Section):
    """How the model is trained: batch, budget, optimizer, schedule, precision and when to stop."""

    global_batch_size: BatchSize = key(
        "Samples per optimizer step over all processes; with `data.batching`, packs or batches by tokens. Gradient "
        "accumulation is derived from it."
    )
    microbatch_size: BatchSize | Literal["auto"] = key(
        "Samples (packs, batches) per forward pass and process. `auto`: the most that fit into memory, found before "
        "the first step and kept when the run resumes; the samples of a step and its loss do not depend on it."
    )
    try_longest_batch: Literal["auto", "always", "never"] = key(
        "Run the longest batch of the job forward and backward before the first step, so that no run is out of memory "
        "hours later; nothing is changed by it. `auto`: on a GPU always, on a CPU where the estimate is not far below "
        "what is free.",
        "auto",
    )
    steps: Positive | None = key("Budget in optimizer steps. Exactly one of `steps`, `epochs`, `tokens`.", None)
    epochs: float | None = key(
        "Budget in passes over the training data, or over `data.train.mix`.", None, gt=0.0, le=MAX_FACTOR
    )
    tokens: Annotated[int, Field(ge=1, le=10**15)] | None = key("Budget in tokens, without padding.", None)
    learning_rate: float = key("Peak learning rate.", gt=0.0, le=MAX_FACTOR)
    learning_rate_scaling: ScalingSection | None = key("Scale the rate with the global batch.", None)
    optimizer: OptimizerSection = key("The update rule.", OptimizerSection())
    schedule: ScheduleSection = key("The learning rate as a function of the step.", ScheduleSection())
    unfreeze: Unfreezes = key("Parameters that stay frozen at first, such as a pre-trained body under a new head.", ())
    average: AverageSection | None = key("Evaluate and export a moving average of the weights.", None)
    embedding_noise: float = key(
        "NEFTune's alpha (Jain et al., 2023, arXiv:2310.05914): uniform noise on the embeddings during training.",
        0.0,
        ge=0,
        le=MAX_FACTOR,
    )
    router_aux_loss: Annotated[float, Field(gt=0.0, le=MAX_FACTOR)] | Literal["auto"] | None = key(
        "Mixtures of experts: add the routers' load-balancing loss (Fedus et al., 2021, arXiv:2101.03961) with this "
        "coefficient, over all tokens of the step on all processes; `auto`: that of the model's config. With gradient "
        "accumulation it takes another forward pass.",
        None,
    )
    max_gradient_norm: float | None = key(
        "Clip the gradient to this global norm; `null` does not clip.", 1.0, gt=0.0, le=1e12
    )
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = key(
        "Arithmetic of forward and backward passes. fp16 scales the loss and needs a GPU. fp8 is bf16 with linear "
        "layers that multiply in 8 bits while they train; it needs a GPU of compute capability 8.9, and torchao unless "
        "all of these layers are frozen, under one process or DDP and not compiled.",
        "fp32",
    )
    fp8: Fp8Section | None = key("How linear layers multiply with `precision: fp8`; unset: its defaults.", None)
    tf32: bool | Literal["auto"] = key(
        "On NVIDIA GPUs, multiply float32 matrices as TensorFloat-32: several times faster, with 10 bits of mantissa "
        "instead of 23. `auto`: where the GPU has it, except with `run.deterministic`. Rotary positions are exact in "
        "any case.",
        "auto",
    )
    loss_kernel: LossKernel = key(
        f"How the token loss is computed. {LOSS_KERNELS.describe()}",
        "auto",
    )
    nonfinite: NonFiniteSection = key("What to do with a NaN or infinite loss or gradient.", NonFiniteSection())
    early_stopping: EarlyStoppingSection | None = key("Stop when an evaluation metric no longer improves.", None)
    callbacks: Callbacks = key(
        "Callbacks that plugins add: they watch the events, and may request an evaluation, a checkpoint or a stop.", ()
    )
    time_limit_minutes: float | None = key(
        "Stop, with a checkpoint, after this many minutes.", None, gt=0.0, le=MAX_COUNT
    )
    stop_after_steps: Positive | None = key(
        "Stop, with a checkpoint, once this many steps are done; budget and schedule are unchanged.", None
    )

    @property
    def known_microbatch_size(self) -> int:
        """Return `microbatch_size`; 1 where that is `auto`, which is not known before the run."""
        return 1 if self.microbatch_size == "auto" else self.microbatch_size
