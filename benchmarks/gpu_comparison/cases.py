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
    seconds: float = 14.0  # that it is expected to take
    least_gib: float = 0.0  # of GPU memory
    needs: str = ""  # a package that the case needs
    overrides: Mapping[str, Any] = field(default_factory=dict)  # ours: keys of the job; others: their settings

    @property
    def steps(self) -> int:
        """Return how many are taken; the cost of the last is unknown, because nothing follows it."""
        return WARM_UP + TIMED + PROFILED + 1

    @property
    def is_packed(self) -> bool:
        """Tell whether a step is one row of as many documents as fit."""
        return "packing" in self.overrides or self.overrides.get("data.batching.by") == "packs"

    def record(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


COMPILED = {"model.compile": "regional"}
WHOLE_UPDATE = {"train.optimizer.stochastic_rounding": True, "train.optimizer.state_dtype": "bfloat16"}
END_TO_END = {"data.batching.padding_free": True}
PADDED = {"data.batching.padding_free": False}
VARYING: dict[str, Any] = {"shape": "qwen3-0.6b", "varies": True, "rows": 8}
LORA: dict[str, Any] = {"shape": "llama-8b", "rows": 1, "lora": True, "dtype": "bfloat16", "seconds": 20.0}


def cases() -> list[Case]:
    """Return all cases, those with thresholds first."""
    return [*_thresholds(), *_peers(), *_switches()]


def one_of_each() -> list[Case]:
    """Return a case for every path that the code has."""
    return [case for case in cases() if case.name in ONE_OF_EACH]


ONE_OF_EACH = frozenset(
    {
        *("8B LoRA, ours", "8B LoRA, bare", "8B LoRA, Trainer", "1B full, ours compiled", "varying, Trainer"),
        *("varying, ours", "varying, ours packs", "varying, TRL packing", "varying, ours rows on flash"),
        *("3B full bf16 weights, ours", "1B full, bare", "1B full, ours selective"),
    }
)


def _thresholds() -> list[Case]:
    halves: dict[str, Any] = {"dtype": "bfloat16"}
    compiled_halves = {**COMPILED, **WHOLE_UPDATE}
    return [
        Case("8B LoRA, ours", "ours", **LORA),
        Case("1B full, ours", "ours", "llama-1b"),
        Case(
            "1B full bf16 weights, ours compiled", "ours", "llama-1b", **halves, overrides=compiled_halves, seconds=40
        ),
        Case("varying, Trainer", "trainer", **VARYING),
        Case("varying, ours", "ours", **VARYING, overrides=END_TO_END),
        Case("varying, ours packs", "ours", **VARYING, overrides=packs(4096)),
        Case(
            "varying, TRL packing",
            "trl",
            **VARYING,
            needs="trl",
            overrides={"packing": True, "packing_strategy": "bfd"},
        ),
        Case("3B full bf16 weights, ours", "ours", "llama-3b", **halves, overrides=WHOLE_UPDATE),
        Case(
            "3B full bf16 weights, ours compiled", "ours", "llama-3b", **halves, overrides=compiled_halves, seconds=45
        ),
        Case("1B full bf16 weights, ours", "ours", "llama-1b", **halves, overrides=WHOLE_UPDATE),
        Case("1B full, ours compiled", "ours", "llama-1b", overrides=COMPILED, seconds=40),
        Case("3B full, ours", "ours", "llama-3b", least_gib=100),
        Case("8B LoRA, ours compiled", "ours", **{**LORA, "seconds": 45.0}, overrides=COMPILED),
    ]


def _peers() -> list[Case]:
    return [
        Case("1B full, bare", "bare", "llama-1b"),
        Case("1B full, Trainer", "trainer", "llama-1b"),
        Case("8B LoRA, bare", "bare", **LORA),
        Case("8B LoRA, Trainer", "trainer", **LORA),
        Case("varying, bare", "bare", **VARYING),
        Case(
            "varying, Trainer grouped", "trainer", **VARYING, overrides={"train_sampling_strategy": "group_by_length"}
        ),
    ]


def _switches() -> list[Case]:
    """Return ours with one setting changed at a time."""
    one = {"competitor": "ours", "shape": "llama-1b"}
    return [
        Case("varying, ours padded", "ours", **VARYING, overrides=PADDED),
        Case("varying, ours rows on sdpa", "ours", **VARYING, overrides={**END_TO_END, "model.attention": "sdpa"}),
        Case(
            "varying, ours rows on flash",
            "ours",
            **VARYING,
            needs="flash_attn",
            overrides={**END_TO_END, "model.attention": "flash_attention_2"},
        ),
        Case("1B full, ours plain loss", **one, overrides={"train.loss_kernel": "plain"}),
        Case("1B full, ours Liger loss", **one, needs="liger_kernel", overrides={"train.loss_kernel": "liger"}),
        Case("1B full, ours checkpointing", **one, overrides={"model.gradient_checkpointing": True}),
        Case("1B full, ours selective", **one, overrides={"model.gradient_checkpointing": "selective"}),
        Case("1B full, ours 4 rows", **one, rows=4),
        Case("varying, ours compiled", "ours", **VARYING, overrides={**END_TO_END, **COMPILED}, seconds=60),
        Case("0.6B full, ours", "ours", "qwen3-0.6b"),
    ]


def packs(tokens: int) -> dict[str, Any]:
    """Return what lays documents into packs of so many tokens."""
    return {"data.batching.by": "packs", "data.batching.tokens": tokens}


def shortened(case: Case) -> Case:
    """Return the case with short documents: it then runs through the same code on a CPU."""
    overrides = {key: TINY_LENGTH if key == "data.batching.tokens" else value for key, value in case.overrides.items()}
    return replace(case, length=TINY_LENGTH, overrides=overrides)
