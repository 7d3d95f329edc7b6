"""The model card: the origin of the model, its training, and how to load it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from huggingface_hub import ModelCardData

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
    card_facts: CardFacts, *, base: CardBase | None, template_arguments: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return the card as Markdown with the hub's metadata; `base` is None for a model trained from random weights.

    No license is stated: it depends on base and data.
    """
    software = ", ".join(f"{name} {version}" for name, version in card_facts.software.items())
    sections = (
        f"---\n{_metadata(card_facts, base)}\n---",
        f"# {card_facts.title}",
        _summary(card_facts, base),
        _metrics(card_facts.metrics),
        f"## Load\n\n```python\n{_loader(card_facts.head, _adapter(base))}```",
        _SENTENCES if card_facts.head == "embedding" else "",
        "## Chat\n\n```\nfinetune chat PATH_OF_THIS_FOLDER\n```" if card_facts.head == "causal_lm" else "",
        _template_arguments(template_arguments),
        f"## Config\n\n```yaml\n{card_facts.config_text.rstrip()}\n```" if card_facts.config_text else "",
        f"## Software\n\n{software}" if software else "",
    )
    return "\n\n".join(section for section in sections if section) + "\n"


_SENTENCES = """## Embed

```
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("PATH_OF_THIS_FOLDER")
vectors = model.encode_document(["a text"])
```"""


def _adapter(base: CardBase | None) -> CardBase | None:
    return base if base is not None and base.relation == "adapter" else None


def _metadata(facts: CardFacts, base: CardBase | None) -> str:
    metadata: dict[str, Any] = {"library_name": "transformers" if _adapter(base) is None else "peft"}
    metadata |= {"pipeline_tag": PIPELINES[facts.head], "tags": ["finetune", facts.task.replace("_", "-")]}
    if base is not None and base.hub_name is not None:
        metadata |= {"base_model": base.hub_name, "base_model_relation": base.relation}
    return ModelCardData(**metadata).to_yaml().strip()


def _summary(facts: CardFacts, base: CardBase | None) -> str:
    steps = f"Trained for {facts.num_steps:,} steps (task `{facts.task}`) with `finetune`."
    origin = steps if facts.num_steps else "Written with `finetune`."
    if base is None:
        return origin
    if base.was_merged:
        name = "" if base.name is None else f" {_location(base)}"
        return f"{origin} An adapter was merged into its base{name}: this is a full model that does not need peft."
    if base.relation == "finetune":
        return f"{origin} It was trained from {_location(base)}."
    names = ", ".join(f"`{name}`" for name in base.config_values)
    changes = f" It was trained with other values of {names} in the base's config: load the base with `config/`."
    return f"{origin} This folder holds an adapter; its base is {_location(base)}.{changes if names else ''}"


def _location(base: CardBase) -> str:
    return "in `base/`" if base.name is None else f"`{base.name}`"


def _metrics(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return ""
    rows = [f"| {name} | {value:.6g} |" for name, value in metrics.items()]
    return "\n".join(["## Metrics of the last evaluation", "", "| metric | value |", "|---|---|", *rows])


def _loader(head: str, adapter: CardBase | None) -> str:
    auto = HEADS[head].__name__
    variable, reader = _INPUTS.get(head, ("tokenizer", "AutoTokenizer"))
    names = [auto, reader, *(["AutoConfig"] if adapter is not None and adapter.has_own_config else [])]
    lines = [] if adapter is None else ["from peft import PeftModel"]
    lines += [f"from transformers import {', '.join(sorted(names))}", "", 'folder = "PATH_OF_THIS_FOLDER"']
    lines.append(f"{variable} = {reader}.from_pretrained(folder)")
    if adapter is None:
        lines.append(f"model = {auto}.from_pretrained(folder)")
        return "\n".join(lines) + "\n"
    path = 'f"{folder}/base"' if adapter.name is None else f'"{adapter.name}"'
    options = ', config=AutoConfig.from_pretrained(f"{folder}/config")'
    if auto in {HEADS[head].__name__ for head in NEW_HEADS}:
        options += ", ignore_mismatched_sizes=True"
    lines.append(f"base = {auto}.from_pretrained({path}{options if adapter.has_own_config else ''})")
    if adapter.num_embeddings is not None:
        lines.append(f"base.resize_token_embeddings({adapter.num_embeddings}, mean_resizing=False)")
    return "\n".join([*lines, "model = PeftModel.from_pretrained(base, folder)"]) + "\n"


def _template_arguments(arguments: Mapping[str, Any]) -> str:
    if not arguments:
        return ""
    keywords = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    body = format_json({"messages": ["..."], "chat_template_kwargs": dict(arguments)})
    return (
        "## Chat template\n\nTrained with these chat template arguments. `finetune chat` and `finetune generate` "
        "pass them; other programs must pass them, too:\n\n"
        f"```python\ntokenizer.apply_chat_template(messages, add_generation_prompt=True, {keywords})\n```\n\n"
        f"In requests to vLLM or SGLang:\n\n```json\n{body}\n```"
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
