"""The model card: the origin of the model, its training, and how to load it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from huggingface_hub import ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from finetune.export.engines import IGNORED_KEYS
from finetune.model.loading.architecture import HEADS, NEW_HEADS
from finetune.model.loading.pretrained import ADAPTER_CONFIG
from finetune.runtime.text.terminal import format_json

PIPELINES: Mapping[str, str] = {
    "causal_lm": "text-generation",
    "seq2seq_lm": "text2text-generation",
    "masked_lm": "fill-mask",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "image_classification": "image-classification",
    "image_text_to_text": "image-text-to-text",
    "embedding": "sentence-similarity",
}
"""The hub's pipeline tag of each head."""

_INPUTS = {
    "image_classification": ("processor", "AutoImageProcessor"),
    "image_text_to_text": ("processor", "AutoProcessor"),
}


@dataclass(frozen=True)
class CardFacts:
    """The facts about the run in the card; `config_text` is the resolved job YAML, empty if there was no such run."""

    title: str
    task: str
    num_steps: int
    metrics: Mapping[str, float]
    config_text: str
    software: Mapping[str, str] = field(default_factory=dict)
    head: str = "causal_lm"
    config_values: Mapping[str, Any] = field(default_factory=dict)  # values of the base's config changed by the run


@dataclass(frozen=True)
class CardBase:
    """The model's origin: a hub name or folder, or None if the adapter's base is next to it in `base/`."""

    name: str | None
    relation: Literal["adapter", "finetune"] = "adapter"
    was_merged: bool = False
    has_own_config: bool = False  # the adapter's folder has a config whose classes or values differ from the base's
    config_values: Mapping[str, Any] = field(default_factory=dict)  # the values that differ
    num_embeddings: int | None = None  # if the vocabulary differs from the base's

    @property
    def hub_name(self) -> str | None:
        """Return the name if it is a hub name."""
        return None if self.name is None or self.name.startswith((".", "/", "~")) else self.name


def write_card(
    facts: CardFacts, *, base: CardBase | None, template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return the card as Markdown with the hub's metadata; `base` is None for a model trained from random weights.

    No license is stated: it depends on base and data.
    """
    adapter = base if base is not None and base.relation == "adapter" else None
    metadata: dict[str, Any] = {"library_name": "transformers" if adapter is None else "peft"}
    metadata |= {"pipeline_tag": PIPELINES[facts.head], "tags": ["finetune", facts.task.replace("_", "-")]}
    if base is not None and base.hub_name is not None:
        metadata |= {"base_model": base.hub_name, "base_model_relation": base.relation}
    variable, reader = _INPUTS.get(facts.head, ("tokenizer", "AutoTokenizer"))
    auto = HEADS[facts.head].__name__
    request = {"messages": ["..."], "chat_template_kwargs": dict(template_arguments)}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("card.md.jinja").render(
        facts=facts,
        base=base,
        is_adapter=adapter is not None,
        metadata=ModelCardData(**metadata).to_yaml().strip(),
        auto=auto,
        variable=variable,
        reader=reader,
        imports=sorted([auto, reader, *(["AutoConfig"] if adapter is not None and adapter.has_own_config else [])]),
        has_new_head=auto in {HEADS[head].__name__ for head in NEW_HEADS},
        template_arguments=template_arguments,
        keywords=", ".join(f"{name}={value!r}" for name, value in template_arguments.items()),
        request=format_json(request),
    )


def vllm_hint(folder: Path) -> str | None:
    """Return a warning if vLLM would serve the adapter in the folder incorrectly; None for any other folder."""
    path = folder / ADAPTER_CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    keys = [f"`{key}`" for key in IGNORED_KEYS if config.get(key)]
    if not keys:
        return None
    return (
        f"vLLM silently ignores {' and '.join(keys)} of this adapter, so it would serve a different model. To use "
        f"vLLM, merge the adapter: finetune export {folder} --merge"
    )
