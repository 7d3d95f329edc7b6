"""The attention implementations that `model.attention` chooses from, and ours."""

from dataclasses import dataclass

from finetune.registry.table import Entry, Table

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
