"""Choices of `model:` besides weights: attention, types of adapters; and the arithmetic of `train.precision`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class PeftTypeEntry(Entry):
    """A type of adapter, by peft's name in lowercase. Unlisted types run only where no strategy shards the weights."""

    is_merged_exactly: bool = False
    is_proven_sharded: bool = False  # under FSDP2: losses, resume and export as on one process
    is_proven_everywhere: bool = False  # under every strategy
    is_prompt: bool = False  # prepends learned tokens or keys to the text and changes no weights
    arguments: tuple[str, ...] = ()  # the only ones of peft's config that a job may write; empty: all
    former_keys: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Up to 0.2, `model.NAME` was a section: the argument of peft's config and the default of each of its keys."""
    refusal: str = ""  # why it cannot be trained; empty if it can


_OWN_SECTION = "it has a section of its own: write `model.{}`"
_OTHER_INPUTS = "it trains tokens, keys or routes of its own; write `prompt_tuning` or `prefix_tuning`"

PEFT_TYPES = Table(
    "type of adapter",
    PeftTypeEntry,
    (
        PeftTypeEntry(
            name="ia3",
            description="scales on activations (Liu et al., 2022, arXiv:2205.05638)",
            is_merged_exactly=True,
            is_proven_sharded=True,
            is_proven_everywhere=True,
            former_keys={name: (name, None) for name in ("target_modules", "feedforward_modules")},
        ),
        PeftTypeEntry(
            name="oft",
            description="orthogonal blocks (Qiu et al., 2023, arXiv:2306.07280)",
            is_merged_exactly=True,
            is_proven_sharded=True,
            is_proven_everywhere=True,
            former_keys={
                "block_size": ("oft_block_size", 32),
                "dropout": ("module_dropout", None),
                "target_modules": ("target_modules", "all-linear"),
            },
        ),
        PeftTypeEntry(
            name="prompt_tuning",
            description="tokens before the text (Lester et al., 2021, arXiv:2104.08691)",
            is_proven_sharded=True,
            is_proven_everywhere=True,
            is_prompt=True,
            arguments=("num_virtual_tokens", "prompt_tuning_init_text"),
            former_keys={
                "num_tokens": ("num_virtual_tokens", 16),
                "init_text": ("prompt_tuning_init_text", None),
            },
        ),
        PeftTypeEntry(
            name="prefix_tuning",
            description="keys and values before the text, in every layer (Li & Liang, 2021, arXiv:2101.00190)",
            is_proven_sharded=True,
            is_proven_everywhere=True,
            is_prompt=True,
            arguments=("num_virtual_tokens",),
            former_keys={"num_tokens": ("num_virtual_tokens", 16)},
        ),
        PeftTypeEntry(
            name="loha",
            description="Hadamard products (Hyeon-Woo et al., 2021, arXiv:2108.06098)",
            is_merged_exactly=True,
            is_proven_sharded=True,
        ),
        PeftTypeEntry(
            name="lokr",
            description="Kronecker products (Yeh et al., 2023, arXiv:2309.14859)",
            is_merged_exactly=True,
            is_proven_sharded=True,
        ),
        PeftTypeEntry(
            name="vera",
            description="scales of shared random projections (Kopiczko et al., 2023, arXiv:2310.11454)",
            is_proven_sharded=True,
        ),
        PeftTypeEntry(
            name="boft",
            description="orthogonal butterflies (Liu et al., 2023, arXiv:2311.06243)",
            is_proven_sharded=True,
        ),
        PeftTypeEntry(name="lora", refusal=_OWN_SECTION.format("lora")),
        PeftTypeEntry(name="trainable_tokens", refusal=_OWN_SECTION.format("new_tokens")),
        PeftTypeEntry(name="adalora", refusal="its ranks are changed by a call after each step. Use `model.lora`"),
        PeftTypeEntry(name="p_tuning", refusal=_OTHER_INPUTS),
        PeftTypeEntry(name="multitask_prompt_tuning", refusal=_OTHER_INPUTS),
        PeftTypeEntry(name="cpt", refusal=_OTHER_INPUTS),
        PeftTypeEntry(name="adaption_prompt", refusal=_OTHER_INPUTS),
        PeftTypeEntry(name="poly", refusal=_OTHER_INPUTS),
        PeftTypeEntry(name="xlora", refusal=_OTHER_INPUTS),
    ),
)


def trainable_types() -> tuple[str, ...]:
    """Return the types that are known to work."""
    return tuple(entry.name for entry in PEFT_TYPES if not entry.refusal)


def is_prompt_type(name: str) -> bool:
    """Return whether adapters of this type prepend learned tokens or keys to the text."""
    return name in PEFT_TYPES and PEFT_TYPES[name].is_prompt


def former_adapter(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of `model.peft` in the place of a former section `model.NAME` with these keys."""
    values = {argument: section.get(key, default) for key, (argument, default) in PEFT_TYPES[name].former_keys.items()}
    return {"type": name, "values": {argument: value for argument, value in values.items() if value}}


PER_SAMPLE_ATTENTION = "per_sample"
"""The name by which transformers knows our attention."""


@dataclass(frozen=True, kw_only=True)
class AttentionEntry(Entry):
    """An attention implementation; all but ours are transformers' own."""

    takes_boundaries: bool = False  # of the samples in a row; others find them in the positions
    masks_whole_rows: bool = False  # with a mask of the row's length squared, where samples share it
    package: str | None = None  # that has to be installed, for CUDA GPUs alone


ATTENTIONS = Table(
    "attention",
    AttentionEntry,
    (
        AttentionEntry(name="auto", description="the fastest one that keeps the samples of a row apart"),
        AttentionEntry(name="eager", masks_whole_rows=True),
        AttentionEntry(name="sdpa", masks_whole_rows=True),
        AttentionEntry(name="flash_attention_2", takes_boundaries=True, package="flash_attn"),
        AttentionEntry(name="flash_attention_3", takes_boundaries=True, package="flash_attn_interface"),
        AttentionEntry(name="flex_attention", masks_whole_rows=True),
        AttentionEntry(
            name=PER_SAMPLE_ATTENTION,
            implementation="finetune.model.attention.implementation:per_sample_attention",
            takes_boundaries=True,
            is_internal=True,
        ),
    ),
)


def takes_boundaries(name: str | None) -> bool:
    """Return whether a model's attention is given where samples begin and end; of an unknown one, it is not."""
    return name is not None and name in ATTENTIONS and ATTENTIONS[name].takes_boundaries


@dataclass(frozen=True)
class Arithmetic:
    """The dtypes of forward and backward passes, except in the linear layers of fp8."""

    name: Literal["fp32", "bf16", "fp16"]  # also the name of its peak FLOP/s in a GPU's specification
    dtype: Literal["float32", "bfloat16", "float16"]  # torch's name
    item_bytes: int

    @property
    def mixed_precision(self) -> str:
        """Return the value of Accelerate's `mixed_precision`."""
        return "no" if self.name == "fp32" else self.name


_BF16 = Arithmetic("bf16", "bfloat16", 2)

ARITHMETIC = {
    "fp32": Arithmetic("fp32", "float32", 4),
    "bf16": _BF16,
    "fp16": Arithmetic("fp16", "float16", 2),
    "fp8": _BF16,
}
"""By `train.precision`.

fp8 runs with Accelerate's bf16, and the layers are converted before `prepare`: Accelerate's own fp8 (1.15) has no
emulation, converts the head's neighbors, and under FSDP2 refuses to load the weights on rank 0 alone.
"""

POOLING_MODES = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "last_token": "pooling_mode_lasttoken",
}
"""The keys of sentence-transformers before 6 by our names of pooling; 6 writes `pooling_mode: lasttoken`."""
