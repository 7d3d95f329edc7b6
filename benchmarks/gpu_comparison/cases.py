"""What is measured on the GPU, the most important cases first: when the time is up, the rest is left out."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

WARM_UP, TIMED, PROFILED = 5, 12, 2
"""Steps of a case. Those that are profiled lie between two log points (every 10)."""
LOG_EVERY = 10
TINY_LENGTH = 128
UNFINISHED = "it ended before all steps were taken"


@dataclass(frozen=True)
class Case:
    """One competitor on one shape: `rows` documents a step, of `length` tokens each or of lengths up to that."""

    name: str
    competitor: str  # ours, bare, trainer, trl
    shape: str
    length: int = 4096
    rows: int = 2
    varies: bool = False
    lora: bool = False
    dtype: str = "float32"  # of the weights; the arithmetic is bf16
    strategy: str = ""  # a file of accelerate_configs, with one rank; none: one process alone
    seconds: float = 16.0  # that it is expected to take
    least_gib: float = 0.0  # of GPU memory
    needs: tuple[str, ...] = ()  # packages beside those that every case needs
    rank: int = 16  # of LoRA, on the modules of `targets`
    targets: str | tuple[str, ...] = "all-linear"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # ours: keys of the job; others: their settings

    @property
    def steps(self) -> int:
        """Return how many are taken; the cost of the last is unknown, because nothing follows it."""
        return WARM_UP + TIMED + PROFILED + 1

    @property
    def is_packed(self) -> bool:
        """Tell whether a step is one row of as many documents as fit."""
        return "packing" in self.overrides or self.overrides.get("data.batching.by") == "packs"

    @property
    def required(self) -> tuple[str, ...]:
        """Return the packages without which it cannot run."""
        return (*(OURS_NEEDS if self.competitor == "ours" else ()), *self.needs)

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


OURS_NEEDS = ("pydantic", "ruamel.yaml")
TRL_NEEDS = ("trl", "datasets")
COMPILED = {"model.compile": "regional"}
WHOLE_UPDATE = {"train.optimizer.stochastic_rounding": True, "train.optimizer.state_dtype": "bfloat16"}
END_TO_END = {"data.batching.padding_free": True}
PADDED = {"data.batching.padding_free": False}
VARYING: dict[str, Any] = {"shape": "qwen3-0.6b", "varies": True, "rows": 8}
LORA: dict[str, Any] = {"shape": "llama-8b", "rows": 1, "lora": True, "dtype": "bfloat16", "seconds": 22.0}
QWEN: dict[str, Any] = {**LORA, "shape": "qwen2.5-7b"}
SHORT_LORA: dict[str, Any] = {
    **{"shape": "llama-3b", "length": 768, "rows": 4, "varies": True, "lora": True, "dtype": "bfloat16"},
    **{"rank": 32, "targets": ("q_proj", "v_proj")},
}
"""The size of peft's comparison on MetaMathQA."""
ONE_B: dict[str, Any] = {"shape": "llama-1b", "rows": 4}
THREE_B: dict[str, Any] = {"shape": "llama-3b", "seconds": 20.0}
HALVES: dict[str, Any] = {"dtype": "bfloat16"}


def cases() -> list[Case]:
    """Return all cases, those with thresholds first."""
    return [*_thresholds(), *_second_chances(), *_peers(), *_switches()]


def one_of_each() -> list[Case]:
    """Return a case for every path that the code has."""
    return [case for case in cases() if case.name in ONE_OF_EACH]


ONE_OF_EACH = frozenset(
    {
        *("8B LoRA, ours", "8B LoRA, bare", "8B LoRA, Trainer", "1B full, ours compiled", "varying, Trainer"),
        *("varying, ours", "varying, ours packs", "varying, TRL packing", "varying, ours rows on flash"),
        *("3B full bf16 weights, ours", "1B full, bare", "1B full, ours", "1B full, ours selective"),
        *("1B full, ours under fsdp2", "1B full, ours under zero2", "1B full, ours under zero3"),
    }
)


def _thresholds() -> list[Case]:
    packing = {"packing": True, "packing_strategy": "bfd"}
    zero: dict[str, Any] = {**ONE_B, "needs": ("deepspeed",), "seconds": 22.0}
    return [
        Case("8B LoRA, ours", "ours", **LORA),
        Case("7B LoRA, ours", "ours", **QWEN),
        Case("3B LoRA, ours", "ours", **SHORT_LORA, overrides=END_TO_END),
        Case("1B full, ours", "ours", **ONE_B),
        Case("3B full, ours", "ours", **THREE_B, least_gib=100),
        Case("varying, Trainer", "trainer", **VARYING),
        Case("varying, ours", "ours", **VARYING, overrides=END_TO_END),
        Case("varying, TRL packing", "trl", **VARYING, needs=TRL_NEEDS, overrides=packing),
        Case("varying, ours packs", "ours", **VARYING, overrides=packs(4096)),
        Case("1B full, ours under fsdp2", "ours", **ONE_B, strategy="fsdp2"),
        Case("1B full, ours under zero2", "ours", **zero, strategy="zero2"),
        Case("1B full, ours under zero3", "ours", **zero, strategy="zero3"),
        Case("1B full, ours compiled", "ours", **ONE_B, overrides=COMPILED, seconds=40),
        Case("3B full, ours compiled", "ours", **{**THREE_B, "seconds": 45}, overrides=COMPILED, least_gib=100),
    ]


def _second_chances() -> list[Case]:
    """Return other ways to the same thresholds: weights in bf16, compiled layers."""
    compiled_halves = {**COMPILED, **WHOLE_UPDATE}
    return [
        Case("3B full bf16 weights, ours", "ours", **THREE_B, **HALVES, overrides=WHOLE_UPDATE),
        Case("1B full bf16 weights, ours", "ours", **ONE_B, **HALVES, overrides=WHOLE_UPDATE),
        Case(
            *("3B full bf16 weights, ours compiled", "ours"),
            **{**THREE_B, **HALVES, "seconds": 45.0},
            overrides=compiled_halves,
        ),
        Case(
            *("1B full bf16 weights, ours compiled", "ours"), **ONE_B, **HALVES, overrides=compiled_halves, seconds=40
        ),
        Case("8B LoRA, ours compiled", "ours", **{**LORA, "seconds": 45.0}, overrides=COMPILED),
        Case("7B LoRA, ours compiled", "ours", **{**QWEN, "seconds": 45.0}, overrides=COMPILED),
    ]


def _peers() -> list[Case]:
    by_length = {"train_sampling_strategy": "group_by_length"}
    return [
        Case("1B full, bare", "bare", **ONE_B),
        Case("1B full, Trainer", "trainer", **ONE_B),
        Case("8B LoRA, bare", "bare", **LORA),
        Case("8B LoRA, Trainer", "trainer", **LORA),
        Case("varying, bare", "bare", **VARYING),
        Case("varying, Trainer grouped", "trainer", **VARYING, overrides=by_length),
    ]


def _switches() -> list[Case]:
    """Return ours with one setting changed at a time."""
    flash = {**END_TO_END, "model.attention": "flash_attention_2"}
    return [
        Case("8B LoRA, ours plain layers", "ours", **LORA, overrides={"model.kernels": "none"}),
        Case("varying, ours padded", "ours", **VARYING, overrides=PADDED),
        Case("varying, ours rows on flash", "ours", **VARYING, needs=("flash_attn",), overrides=flash),
        Case("1B full, ours plain loss", "ours", **ONE_B, overrides={"train.loss_kernel": "plain"}),
        Case("1B full, ours checkpointing", "ours", **ONE_B, overrides={"model.gradient_checkpointing": True}),
        Case("1B full, ours selective", "ours", **ONE_B, overrides={"model.gradient_checkpointing": "selective"}),
    ]


def packs(tokens: int) -> dict[str, Any]:
    """Return what lays documents into packs of so many tokens."""
    return {"data.batching.by": "packs", "data.batching.tokens": tokens}


def shortened(case: Case) -> Case:
    """Return the case with short documents: it then runs through the same code on a CPU."""
    overrides = {key: TINY_LENGTH if key == "data.batching.tokens" else value for key, value in case.overrides.items()}
    return replace(case, length=TINY_LENGTH, overrides=overrides)
