"""LLaMA-Factory: its keys and stages, the datasets of dataset_info.json, its templates and defaults."""

from collections.abc import Mapping

from finetune.migration.complete import put_source, source_of
from finetune.migration.draft import BUILT_IN, CHAT_NAMES, Draft, PeerTrainer
from finetune.migration.peers.dataset_info import Dataset, read_datasets
from finetune.migration.peers.trainer import finish_arguments, prepare_arguments
from finetune.migration.rules import ONLINE, path
from finetune.registry.losses import PREFERENCE_LOSSES

_STAGES = {"sft": "sft", "pt": "pretrain", "dpo": "preference", "kto": "preference", "rm": "reward"}
_OFT = ("oft_block_size", "oft_target", "module_dropout")


def _prepare(draft: Draft) -> None:
    """Write the task, the adapter, the rows and the template."""
    prepare_arguments(draft)
    datasets = read_datasets(draft, dict.fromkeys([*draft.get("dataset", []), *draft.get("eval_dataset", [])]))
    _task(draft)
    _adapter(draft)
    _rows(draft, datasets)
    _targets(draft)
    if draft.get("uses_muon"):
        draft.entries.pop("train.optimizer.name", None)
        draft.put("train.optimizer.name", "muon", "uses_muon")
    if draft.get("pure_bf16"):
        draft.put("model.dtype", "bfloat16", "pure_bf16")
        draft.put("train.precision", "bf16", "pure_bf16")
        draft.drop("`pure_bf16` is set", "bf16")
    if "disable_gradient_checkpointing" not in draft.file.leaves:
        draft.default("model.gradient_checkpointing", True, "LLaMA-Factory's default")


def _task(draft: Draft) -> None:
    stage = str(draft.get("stage", "sft")).lower()
    signs = ("media_dir", "freezes_vision", "columns.images")
    sees = any(name.startswith(signs) and draft.get(name) != "" for name in draft.facts)
    is_vision = sees or draft.has("data.images")
    task = "vision_language_sft" if is_vision and stage == "sft" else _STAGES.get(stage, "sft")
    draft.put("task.name", task, *(("stage",) if stage in _STAGES else ()))
    if stage not in _STAGES:
        draft.refuse(ONLINE, "stage")
    if task == "preference":
        loss = "kto" if stage == "kto" else str(draft.get("loss", "sigmoid")).replace("kto_pair", "kto")
        if loss in PREFERENCE_LOSSES:
            draft.put("task.preference.loss", loss, "stage", *(() if stage == "kto" else ("loss",)))
        else:
            names = ", ".join(entry.name for entry in PREFERENCE_LOSSES)
            draft.refuse(f"choose one of `task.preference.loss`: {names}.", "loss")
        if loss == "kto" and draft.facts.get("sft_weight", (0,))[0]:
            draft.refuse("`kto` has no further term here: choose another `task.preference.loss`.", "sft_weight")
            draft.facts.pop("sft_weight")
        for name in ("beta", "sft_weight"):
            if name in draft.facts and (name == "beta" or draft.get(name)):
                draft.put(f"task.preference.{name}", draft.get(name), name)
        if loss == "simpo" and "target_margin" in draft.facts:
            draft.put("task.preference.target_margin", draft.get("target_margin"), "target_margin")


def _adapter(draft: Draft) -> None:
    kind = str(draft.get("adapter_type", "lora"))
    if kind == "freeze":
        draft.refuse(
            "the last layers alone are trained in LLaMA-Factory: write their names in `model.train_only`, such as "
            "`['*.layers.31.*', '*.layers.30.*']`.",
            "adapter_type",
            "layers",
        )
    elif kind in ("lora", "oft", "full"):
        leaf = draft.facts.get("adapter_type", (kind, next(iter(draft.file.leaves.values()))))[1]
        draft.facts["adapter"] = (kind, leaf)
    else:
        draft.refuse("choose `model.lora`, `model.peft`, or none for full fine-tuning.", "adapter_type")
    if kind == "oft" and not draft.get("adapter_path"):
        values = {"oft_block_size": draft.get("oft_block_size", 32), "target_modules": draft.get("oft_target")}
        if draft.get("module_dropout"):
            values["module_dropout"] = draft.get("module_dropout")
        draft.put("model.peft", {"type": "oft", "values": values}, "adapter", *_OFT)
    if kind == "lora":
        draft.put("model.lora.target_modules", draft.get("lora_target", "all-linear"), "lora_target")
        draft.default("model.lora.rank", 8, "the default in LLaMA-Factory")
        comment = "twice the rank is the default in LLaMA-Factory"
        draft.default("model.lora.alpha", 2.0 * draft.value("model.lora.rank", 8), comment)
        if draft.get("pissa"):
            draft.put("model.lora.init", "pissa", "pissa")
            draft.put("model.dtype", "float32", comment="as `init: pissa` needs")
    if draft.get("quantization_method", "bnb").lower() not in ("bnb", "bitsandbytes"):
        draft.refuse("name the model in 16 bits, and write `model.quantization`.", "quantization_method", "bits")
    name = str(draft.value("model.name", "")).lower()
    if draft.value("task.name") == "vision_language_sft":
        frozen = ["*visual*" if "qwen" in name else "*vision*"] if draft.get("freezes_vision", True) else []
        frozen += ["*language_model*"] if draft.get("freezes_language") else []
        if frozen and kind == "full":
            comment = "names of parameters: `finetune check --model` looks them up"
            draft.put("model.freeze", frozen, "freezes_vision", "freezes_language", comment=comment)
        elif frozen:
            draft.note("LLaMA-Factory adapts the language model alone; `all-linear` here includes the image encoder.")


def _rows(draft: Draft, datasets: Mapping[str, Dataset]) -> None:
    trained, evaluated = draft.get("dataset", []), draft.get("eval_dataset", [])
    keys = [f"data.train.mix.{index}" for index in range(len(trained))] if len(trained) > 1 else ["data.train"]
    for key, name in zip(keys, trained, strict=False):
        _put_source(draft, key, name, datasets, "dataset")
        if len(trained) > 1:
            draft.put(f"{key}.epochs", 1, comment="all rows of every source")
        if draft.get("streaming"):
            draft.put(f"{key}.stream.window_rows", draft.get("window_rows", 10_000), "window_rows", "streaming")
    if draft.get("mix_strategy", "concat") != "concat" and len(trained) > 1:
        draft.refuse("write `weight` in place of `epochs` at each source.", "mix_strategy", "probabilities")
    for name in evaluated[:1]:
        _put_source(draft, "data.validation", name, datasets, *(["eval_dataset"] if len(evaluated) == 1 else []))
    draft.refuse("validation rows are one source: the first is written. Join the files.", "eval_dataset")
    if (names := dict.fromkeys([*trained, *evaluated])) and not datasets and draft.get("dataset_dir") != "ONLINE":
        draft.note(
            f"{', '.join(names)}: names of dataset_info.json in {draft.get('dataset_dir', 'data')}, which is not here: "
            "write the names on the hub, or paths. With that folder next to the file, they are looked up."
        )


def _put_source(draft: Draft, key: str, name: str, datasets: Mapping[str, Dataset], *facts: str) -> None:
    comment = f"`{name}` of dataset_info.json"
    if name in datasets:
        datasets[name].put(key, *facts, comment=comment)
    else:
        values = source_of(name, draft.file.path.parent) | {"take": draft.get("take")}
        put_source(draft, key, values, *facts, "take", comment=comment)
    if draft.get("media_dir") and draft.value("task.name") == "vision_language_sft":
        draft.put(f"{key}.image_root", path(draft.get("media_dir")), "media_dir")


def _targets(draft: Draft) -> None:
    task, template = draft.value("task.name"), str(draft.get("template", ""))
    name = str(draft.value("model.name", "")).rpartition("/")[2]
    if template in BUILT_IN and task != "pretrain" and not CHAT_NAMES.search(name):
        draft.put("data.chat_template", BUILT_IN[template], "template")
    if "thinking" in draft.facts and task in ("sft", "preference", "reward"):
        draft.put("data.chat_template_arguments", {"enable_thinking": draft.get("thinking")}, "thinking")
    if draft.get("mask_history") and task == "sft":
        draft.put("data.train_on", "last_assistant", "mask_history")
    elif draft.get("train_on_inputs") and task == "sft":
        draft.put("data.train_on", "all", "train_on_inputs")
    packs = (
        draft.get("packing") or draft.get("neat_packing") or (task == "pretrain" and draft.get("packing") is not False)
    )
    if packs and task in ("sft", "pretrain"):
        comment = "" if "packing" in draft.facts or "neat_packing" in draft.facts else "the default of stage `pt`"
        draft.put("data.batching.by", "packs", "packing", "neat_packing", comment=comment)
        if not draft.get("neat_packing"):
            draft.note("samples in a pack see each other in LLaMA-Factory without `neat_packing`; here they never do.")


def _finish(draft: Draft) -> None:
    """Write LLaMA-Factory's own defaults."""
    finish_arguments(draft)
    draft.default("data.max_length", 2048, "the default in LLaMA-Factory")
    is_text = draft.value("task.name") == "pretrain"
    draft.default("data.over_length", "split" if is_text else "truncate", "as in LLaMA-Factory")
    if not is_text:
        draft.note("LLaMA-Factory truncates prompt and answer, without a message; here at the end, and counted.")
    if draft.value("model.trust_remote_code"):
        draft.note("`trust_remote_code: true` runs Python code of the model's repository; most models do not need it.")


LLAMA_FACTORY = PeerTrainer(name="llama_factory", prepare=_prepare, finish=_finish)
