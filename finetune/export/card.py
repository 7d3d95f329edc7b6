"""The model card: what the model is, how it was made, and how to load it and talk to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CardFacts:
    """What the run knows of itself; `config_text` is the resolved job YAML."""

    title: str
    task: str
    num_steps: int
    metrics: Mapping[str, float]
    config_text: str
    software: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CardBase:
    """What an adapter stands on: a hub name or folder, or None where the base lies beside it in `base/`."""

    name: str | None


def write_card(facts: CardFacts, *, base: CardBase | None) -> str:
    """Return the card as Markdown; `base` is None for a whole model."""
    sections = (
        _front_matter(base),
        f"# {facts.title}",
        f"Trained for {facts.num_steps:,} steps (task `{facts.task}`) with `finetune`."
        + ("" if base is None else f" This folder holds a LoRA adapter; its base is {_base_sentence(base)}."),
        _metrics(facts.metrics),
        f"## Load\n\n```python\n{_loader(base)}```",
        "## Chat\n\n```\nfinetune chat PATH_OF_THIS_FOLDER\n```",
        f"## Config\n\n```yaml\n{facts.config_text.rstrip()}\n```",
        _software(facts.software),
    )
    return "\n\n".join(section for section in sections if section) + "\n"


def _front_matter(base: CardBase | None) -> str:
    lines = ["library_name: " + ("transformers" if base is None else "peft"), "pipeline_tag: text-generation"]
    if base is not None and base.name is not None and not base.name.startswith("/"):
        lines.append(f"base_model: {base.name}")
    return "\n".join(["---", *lines, "tags: [finetune]", "---"])


def _base_sentence(base: CardBase) -> str:
    return "in `base/`" if base.name is None else f"`{base.name}`"


def _metrics(metrics: Mapping[str, float]) -> str:
    if not metrics:
        return ""
    rows = [f"| {name} | {value:.6g} |" for name, value in metrics.items()]
    return "\n".join(["## Metrics of the last evaluation", "", "| metric | value |", "|---|---|", *rows])


def _loader(base: CardBase | None) -> str:
    start = "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    folder = 'folder = "PATH_OF_THIS_FOLDER"\n'
    tokenizer = "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
    if base is None:
        return f"{start}\n{folder}model = AutoModelForCausalLM.from_pretrained(folder)\n{tokenizer}"
    place = 'f"{folder}/base"' if base.name is None else f'"{base.name}"'
    return (
        f"from peft import PeftModel\n{start}\n{folder}base = AutoModelForCausalLM.from_pretrained({place})\n"
        f"model = PeftModel.from_pretrained(base, folder)\n{tokenizer}"
    )


def _software(software: Mapping[str, str]) -> str:
    if not software:
        return ""
    return "## Software\n\n" + ", ".join(f"{name} {version}" for name, version in software.items())
