"""What is measured on the GPU: three parts of four minutes each, the most telling cases first."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

WARM_UP, TIMED, PROFILED = 5, 12, 2
"""Steps of a case. Those that are profiled lie between two log points (every 10)."""
STEPS = WARM_UP + TIMED + PROFILED + 1
"""The duration of the last is unknown, because nothing follows it."""
LOG_EVERY = 10
TINY_LENGTH = 128
PART_SECONDS = 240.0


@dataclass(frozen=True)
class Workload:
    """A model and the documents of a step: `rows` of `length` tokens each, or of lengths up to that."""

    shape: str
    rows: int
    length: int = 4096
    varies: bool = False
    dtype: str = "float32"  # of the weights; the arithmetic is bf16
    lora_rank: int = 0  # 0: all weights are trained
    lora_targets: str | tuple[str, ...] = "all-linear"
    job: Mapping[str, Any] = field(default_factory=dict)  # keys of our job


@dataclass(frozen=True)
class Variant:
    """The trainer of a case, with its settings: keys of our job (None removes one), or arguments of the others."""

    competitor: str  # ours, bare, trainer, trl
    settings: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = ""  # a file of accelerate_configs, with one rank; none: one process alone
    packages: tuple[str, ...] = ()  # that it needs in addition to those of every case

    @property
    def is_packed(self) -> bool:
        """Return whether a step is one row of as many documents as fit."""
        return "packing" in self.settings or self.settings.get("data.batching.by") == "packs"


@dataclass(frozen=True)
class Case:
    """A variant on a workload; `seconds` is the time that it is expected to take."""

    part: int
    name: str
    workload: Workload
    variant: Variant
    seconds: float
    least_gib: float  # of GPU memory

    def shortened(self) -> "Case":
        """Return the case with short documents and emulated fp8: the same code, on a CPU."""
        settings = {
            key: TINY_LENGTH if key == "data.batching.tokens" else value for key, value in self.variant.settings.items()
        }
        if settings.get("train.precision") == "fp8":
            settings["train.fp8.emulate"] = True
        workload = replace(self.workload, length=TINY_LENGTH)
        return replace(self, workload=workload, variant=replace(self.variant, settings=settings))


_PADDING_FREE = {"data.batching.padding_free": True}
_ROUNDED = {"train.optimizer.stochastic_rounding": True, "train.optimizer.state_dtype": "bfloat16"}

WORKLOADS = {
    "8B LoRA": Workload("llama-8b", rows=1, dtype="bfloat16", lora_rank=16),
    "7B LoRA": Workload("qwen2.5-7b", rows=1, dtype="bfloat16", lora_rank=16),
    # the size of peft's comparison on MetaMathQA
    "3B LoRA": Workload(
        *("llama-3b", 4, 768, True, "bfloat16", 32, ("q_proj", "v_proj")),
        job=_PADDING_FREE,
    ),
    "1B full": Workload("llama-1b", rows=4),
    "3B full": Workload("llama-3b", rows=2),
    "1B full bf16 weights": Workload("llama-1b", rows=4, dtype="bfloat16", job=_ROUNDED),
    "3B full bf16 weights": Workload("llama-3b", rows=2, dtype="bfloat16", job=_ROUNDED),
    "varying": Workload("qwen3-0.6b", rows=8, varies=True, job=_PADDING_FREE),
}

VARIANTS = {
    "ours": Variant("ours"),
    "ours fp8": Variant("ours", {"train.precision": "fp8"}),
    "ours compiled": Variant("ours", {"model.compile": "regional"}),
    "ours packs": Variant(
        "ours", {"data.batching.by": "packs", "data.batching.tokens": 4096, "data.batching.padding_free": None}
    ),
    "ours under fsdp2": Variant("ours", strategy="fsdp2"),
    "ours under zero2": Variant("ours", strategy="zero2", packages=("deepspeed",)),
    "ours under zero3": Variant("ours", strategy="zero3", packages=("deepspeed",)),
    "ours plain layers": Variant("ours", {"model.kernels": "none"}),
    "ours padded": Variant("ours", {"data.batching.padding_free": False}),
    "ours rows on flash": Variant("ours", {"model.attention": "flash_attention_2"}, packages=("flash_attn",)),
    "ours plain loss": Variant("ours", {"train.loss_kernel": "plain"}),
    "ours checkpointing": Variant("ours", {"model.gradient_checkpointing": True}),
    "ours selective": Variant("ours", {"model.gradient_checkpointing": "selective"}),
    "bare": Variant("bare"),
    "Trainer": Variant("trainer"),
    "TRL packing": Variant("trl", {"packing": True, "packing_strategy": "bfd"}, packages=("trl", "datasets")),
}

_TABLE: tuple[tuple[int, str, str, float], ...] = (
    # part, workload, variant, seconds
    (1, "8B LoRA", "ours", 22),
    (1, "8B LoRA", "ours fp8", 24),
    (1, "7B LoRA", "ours", 22),
    (1, "3B LoRA", "ours", 16),
    (1, "1B full", "ours", 16),
    (1, "3B full", "ours", 20),
    (1, "varying", "Trainer", 16),
    (1, "varying", "ours", 16),
    (1, "varying", "TRL packing", 16),
    (1, "varying", "ours packs", 16),
    (1, "8B LoRA", "bare", 22),
    (2, "1B full", "ours under fsdp2", 16),
    (2, "1B full", "ours under zero2", 22),
    (2, "1B full", "ours under zero3", 22),
    (2, "1B full", "ours compiled", 40),
    (2, "8B LoRA", "ours compiled", 45),
    (2, "3B full", "ours compiled", 45),
    (2, "3B full bf16 weights", "ours", 20),
    (3, "8B LoRA", "Trainer", 22),
    (3, "8B LoRA", "ours plain layers", 22),
    (3, "7B LoRA", "ours fp8", 24),
    (3, "1B full bf16 weights", "ours", 16),
    (3, "1B full", "bare", 16),
    (3, "1B full", "Trainer", 16),
    (3, "1B full", "ours checkpointing", 16),
    (3, "1B full", "ours selective", 16),
    (3, "1B full", "ours plain loss", 16),
    (3, "varying", "ours padded", 16),
    (3, "varying", "ours rows on flash", 16),
    (3, "varying", "bare", 16),
)
_LEAST_GIB = {"3B full": 100.0}

CASES = tuple(
    Case(part, f"{workload}, {variant}", WORKLOADS[workload], VARIANTS[variant], seconds, _LEAST_GIB.get(workload, 0.0))
    for part, workload, variant, seconds in _TABLE
)
