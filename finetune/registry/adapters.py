"""The adapter types that `model.peft.type` accepts, and their properties."""

from dataclasses import dataclass

from finetune.registry.table import Entry, Table


@dataclass(frozen=True, kw_only=True)
class PeftTypeEntry(Entry):
    """A type of adapter, by peft's name in lowercase. Unlisted types run only where no strategy shards the weights."""

    is_merged_exactly: bool = False
    is_proven_sharded: bool = False  # under FSDP2: losses, resume and export are those of one process
    refusal: str = ""  # why it cannot be trained; empty if it can


_OWN_SECTION = "it has a section of its own: write `model.{}`"
_OTHER_INPUTS = "it trains tokens, keys or routes of its own; write `model.prompt_tuning` or `model.prefix_tuning`"

PEFT_TYPES = Table(
    "type of adapter",
    PeftTypeEntry,
    (
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
        PeftTypeEntry(name="ia3", refusal=_OWN_SECTION.format("ia3")),
        PeftTypeEntry(name="oft", refusal=_OWN_SECTION.format("oft")),
        PeftTypeEntry(name="prompt_tuning", refusal=_OWN_SECTION.format("prompt_tuning")),
        PeftTypeEntry(name="prefix_tuning", refusal=_OWN_SECTION.format("prefix_tuning")),
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
