"""torchtune: its model builders, datasets and losses, which are named as components, and its defaults."""

import re
from pathlib import Path
from typing import Any

from finetune.migration.complete import put_source, renamed, source_of, source_with_files
from finetune.migration.draft import ALPACA_ROWS, CHAT_NAMES, Draft, PeerTrainer
from finetune.migration.rules import OWN_LOSS, read_defaults, read_file
from finetune.migration.source import is_present

_OWNERS = {
    **{"llama2": "meta-llama", "llama3": "meta-llama", "llama4": "meta-llama", "code_llama2": "codellama"},
    **{"gemma": "google", "gemma2": "google", "mistral": "mistralai", "phi3": "microsoft", "phi4": "microsoft"},
    **{"qwen2": "Qwen", "qwen2_5": "Qwen", "qwen3": "Qwen"},
}
"""Who publishes a family of models on the hub; `llama3` is also that of llama3_1, llama3_2, llama3_3, ..."""

_TEMPLATES = {"llama2": "mistral", "llama3": "llama3", "gemma": "gemma", "gemma2": "gemma", "mistral": "mistral"}
"""How a family's turns are marked there, for base models, whose tokenizers have no chat template."""

_NOT_OF_ROWS = ("packing", "train_on_inputs", "masking", "max_length")
_TASKS = {"DPOLoss": "sigmoid", "RSOLoss": "hinge", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
_CROSS_ENTROPIES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")


def _prepare(draft: Draft) -> None:
    """Write the model, its adapter, the task and its data."""
    builder = str(draft.get("builder", "")).rpartition(".")[2]
    family = str(draft.get("builder", "..")).split(".")[-2] if "." in str(draft.get("builder", "")) else ""
    if "_distributed" in draft.file.text and "single_device" not in draft.file.path.name:
        draft.is_sharded = True
        processes = re.search(r"--nproc_per_node[ =](\d+)", draft.file.text)
        draft.gpus = draft.gpus or (int(processes[1]) if processes else 2)
        draft.note(f"the comments of the file start a distributed recipe, torchtune's FSDP2, on {draft.gpus} GPUs.")
    elif "single_device" in draft.file.path.name:
        draft.gpus = draft.gpus or 1
    is_vision = "vision" in builder or "vision" in family or "clip" in builder
    _assume(draft, builder, is_vision=is_vision)
    _model(draft, family)
    _adapter(draft, builder, family)
    _task(draft, is_vision=is_vision)
    _data(draft)
    _template(draft, family)
    _training(draft)


def _assume(draft: Draft, builder: str, *, is_vision: bool) -> None:
    """Take the defaults of the components that the file names."""
    names = [draft.get(name, "") for name in ("dataset_builder", "loss")]
    if builder.startswith(("lora_", "qlora_")):
        names.append("lora_llama3_2_vision_11b" if is_vision else "lora_llama3_1_8b")
    if draft.value("train.optimizer.name", "adamw") == "adamw":
        draft.assume("torch AdamW")
    draft.assume(*(f"torchtune {name}" for name in names if f"torchtune {name}" in read_defaults()["defaults"]))
    for part in ("decoder", "encoder", "fusion"):
        if draft.get(part) == "frozen" and part not in draft.facts:
            draft.note(f"torchtune freezes the {part} ({draft.assumed[part][1]}): name the modules that have adapters.")


def _model(draft: Draft, family: str) -> None:
    if "folder" in draft.facts:
        draft.put("model.name", _hub_name(draft.get("folder"), family), "folder")
    if draft.has("model.name") and not str(draft.value("model.name")).startswith("/"):
        draft.note(
            f"the weights lie in {draft.get('folder')} there; here they are read from the hub under the name of that "
            "folder. For a folder in transformers' layout, write its path in `model.name`."
        )


def _hub_name(folder: str, family: str) -> str:
    """Return the folder if it exists, else the name on the hub of the model that torchtune downloads there."""
    if is_present(Path(folder), Path.is_dir):
        return str(Path(folder).absolute())
    owner = _OWNERS.get(family) or next((name for key, name in _OWNERS.items() if family.startswith(key)), None)
    name = Path(folder).name
    return folder if owner is None or not name else f"{owner}/{name}"


def _adapter(draft: Draft, builder: str, family: str) -> None:
    kind = builder.partition("_")[0]
    if kind not in ("lora", "qlora", "dora"):
        return
    leaf = draft.facts["builder"][1]
    draft.facts["adapter"] = ("lora", leaf)
    if kind == "qlora":
        draft.facts["bits"] = (4, leaf)
    if kind == "dora":
        draft.put("model.lora.dora", True, "builder")
    names = draft.get("attention_modules", ["q_proj", "v_proj"])
    names = ["o_proj" if name == "output_proj" else name for name in names]
    names += ["gate_proj", "up_proj", "down_proj"] if draft.get("mlp") else []
    if family.startswith("phi"):
        fused = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
        fused |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
        names = list(dict.fromkeys(fused.get(name, name) for name in names))
        draft.note("transformers keeps Phi's q, k and v in one matrix, gate and up in another: one adapter for each.")
    names += ["lm_head"] if draft.get("output") else []
    draft.put("model.lora.target_modules", names, "attention_modules", "mlp", "output")
    advice = "name the modules of the other parts alone in `model.lora.target_modules`."
    draft.refuse(advice, *(name for name in ("decoder", "encoder", "fusion") if draft.get(name) != "lora"))


def _task(draft: Draft, *, is_vision: bool) -> None:
    loss = draft.get("loss", "")
    reads = read_file("torchtune")["datasets"].get(draft.get("dataset_builder", ""), {})
    preference = ("beta", "target_margin", "preference_smoothing")
    if loss in _TASKS:
        draft.put("task.name", "preference", "loss")
        draft.put("task.preference.loss", _TASKS[loss], "loss")
        for name, key in zip(preference, ("beta", "target_margin", "label_smoothing"), strict=True):
            if name in draft.facts:
                draft.put(f"task.preference.{key}", draft.get(name), name)
    else:
        name = "vision_language_sft" if is_vision else "pretrain" if "text" in reads else "sft"
        draft.put("task.name", name, comment="by model, dataset and loss in torchtune")
    if loss and loss not in (*_TASKS, *_CROSS_ENTROPIES):
        draft.refuse(OWN_LOSS, "loss")


def _data(draft: Draft) -> None:
    builder = draft.get("dataset_builder", "")
    reads = read_file("torchtune")["datasets"].get(builder)
    if reads is None:
        advice = "write `data.train`: name or path, and `format` with `columns` or a `template`."
        draft.refuse(advice, "dataset_builder", *(name for name in draft.facts if name.startswith("dataset_builders.")))
        reads = {}
    if reads.get("note"):
        draft.note(reads["note"])
    source, values = draft.get("source", reads.get("source", "")), {}
    if source:
        values = source_with_files(source, draft.get("data_files"), draft.file.path.parent)
        values |= {"config": draft.get("config", reads.get("config")) if "name" in values else None}
        values["split"] = draft.get("split")
    values |= _reading(draft, reads)
    of_rows = [name for name, (_, leaf) in draft.facts.items() if leaf.key.startswith("dataset.")]
    facts = [name for name in of_rows if name not in _NOT_OF_ROWS]
    put_source(draft, "data.train", values, *(name for name in facts if not draft.is_named(name)))
    if "validation_builder" in draft.facts:
        own = read_defaults()["defaults"].get(f"torchtune {draft.get('validation_builder')}", {})
        source = draft.get("validation_source", own.get("dataset.source", ""))
        validation = {**values, **source_of(source, draft.file.path.parent), "split": draft.get("validation_split")}
        put_source(draft, "data.validation", validation, "validation_builder", "validation_source", "validation_split")
    masking = draft.get("masking")
    trains_prompts = draft.get("train_on_inputs") if masking is None else masking == "train_on_all"
    if trains_prompts and draft.value("task.name") in ("sft", "vision_language_sft"):
        draft.put("data.train_on", "all", "train_on_inputs", "masking")
        by_default = "" if "train_on_inputs" in draft.facts or masking else f", by default of {builder}"
        draft.note(f"prompts are targets in torchtune, too{by_default}: `train_on: all`.")
    elif draft.get("masking") == "train_on_last":
        draft.put("data.train_on", "last_assistant", "masking")
    if draft.get("packing") and draft.value("task.name") in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
        draft.note("packs do not split samples and no sample attends to another, as in torchtune with `packed: True`.")


def _reading(draft: Draft, reads: dict[str, Any]) -> dict[str, Any]:
    """Return format, columns and template of a dataset builder's rows."""
    if "text" in reads:
        column = draft.get("column", reads["text"])
        return {"format": "text", "columns": renamed({"text": column})}
    if "pairs" in reads:
        written = renamed({name: draft.get(f"column_{name}") for name in ("prompt", "chosen", "rejected")})
        return {"format": "preference", "columns": {**reads["pairs"], **written}}
    if "chat" in reads:
        form = "messages" if draft.get("conversation_style") == "openai" else "conversations"
        column = draft.get("conversation_column", form)
        return {"format": form, "columns": renamed({form: column})}
    if "template" in reads:
        template = ALPACA_ROWS if reads["template"] == "alpaca" else reads["template"]
        for part in ("instruction", "input", "output"):
            name = draft.get(f"column_{part}", part)
            template = {key: re.sub(rf"\b{part}\b(?= (%|\}}|is|and))", name, text) for key, text in template.items()}
        return {"format": "prompt_completion", "template": template}
    if "columns" in reads:
        written = renamed({"prompt": draft.get("column_input"), "completion": draft.get("column_output")})
        return {"format": "prompt_completion", "columns": {**reads["columns"], **written}}
    return {}


def _template(draft: Draft, family: str) -> None:
    name = str(draft.value("model.name", ""))
    key = next((key for key in _TEMPLATES if family.startswith(key)), None)
    if draft.value("task.name") in ("pretrain",) or key is None or CHAT_NAMES.search(name.partition("/")[2]):
        return
    draft.put("data.chat_template", _TEMPLATES[key], comment="this base model has none; nearest to torchtune's turns")


def _training(draft: Draft) -> None:
    if draft.value("model.gradient_checkpointing") is not False and draft.get("checkpointing_option", 1) > 1:
        draft.put("model.gradient_checkpointing", draft.get("checkpointing_option"), "checkpointing_option")
    if "max_length" in draft.facts:
        draft.put("data.max_length", draft.get("max_length"), "max_length")
    if draft.get("logger"):
        draft.put("report.trackers", [draft.get("logger")], "logger")
    if draft.get("replicas", 1) > 1:
        draft.facts["fsdp_sharding"] = ("hybrid", draft.facts["replicas"][1])


def _finish(draft: Draft) -> None:
    """Write torchtune's own defaults."""
    if not draft.has("data.max_length"):
        draft.put("data.max_length", 4096, comment="no limit in torchtune")
        draft.put("data.over_length", "refuse", comment="no limit in torchtune; here a longer row stops the run")
    else:
        draft.default("data.over_length", "truncate", "as in torchtune")
        draft.note("rows longer than `max_length` are truncated in torchtune without a message; here they are counted.")
    if not draft.has("train.steps"):
        draft.default("train.epochs", 1, "not in the file: every recipe needs it")
    draft.default("train.schedule.name", "constant", "no scheduler in torchtune")
    if "train.max_gradient_norm" not in draft.entries and "train.max_gradient_norm" not in draft.defaults:
        draft.put("train.max_gradient_norm", None, comment="torchtune does not clip gradients; the default here is 1.0")
    draft.note("weight decay is applied to all weights in torchtune, to matrices alone here.")
    if not draft.has("checkpoint.every_steps"):
        draft.note(
            "torchtune writes a checkpoint after each epoch; here at the end, and every `checkpoint.every_steps`."
        )


TORCHTUNE = PeerTrainer(name="torchtune", prepare=_prepare, finish=_finish)
