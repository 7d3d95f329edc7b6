"""ms-swift: its tasks, its datasets with `#rows` in their names, and its defaults."""

import re

from finetune.migration.complete import put_source, source_of
from finetune.migration.draft import Draft
from finetune.migration.peers.peer import Peer
from finetune.migration.peers.trainer import finish_arguments, name_placeholders, prepare_arguments
from finetune.migration.tables.ms_swift import MS_SWIFT as TABLE

_LOSSES = {"dpo": "sigmoid", **{name: name for name in ("kto", "orpo", "simpo", "cpo")}}
_TASKS = {"causal_lm": "sft", "embedding": "embedding", "reranker": "reranking", "seq_cls": "text_classification"}
_DATASET = re.compile(r"(?:(?:hf|ms)::)?(?P<name>[^#:]+)(?::(?P<config>[^#]+))?(?:#(?P<take>\d+))?")


def prepare(draft: Draft) -> None:
    """Write the task, the adapter and the rows."""
    prepare_arguments(draft)
    _task(draft)
    kind = {"longlora": "lora", "adalora": "lora"}.get(
        draft.get("adapter_type", "lora"), draft.get("adapter_type", "lora")
    )
    if kind in ("lora", "full"):
        leaf = draft.facts.get("adapter_type", (kind, next(iter(draft.file.leaves.values()))))[1]
        draft.facts["adapter"] = (kind, leaf)
    else:
        draft.refuse("choose `model.lora`, or none for full fine-tuning.", "adapter_type")
    if kind == "lora":
        draft.put("model.lora.target_modules", draft.get("lora_target", "all-linear"), "lora_target")
        draft.default("model.lora.rank", 8, "the default there")
        draft.default("model.lora.dropout", 0.05, "the default there")
    draft.drop("no LoRA is trained there", "lora_target")
    if draft.get("quantization_method", "bnb").lower() not in ("bnb", "none"):
        draft.refuse("name the model in 16 bits, and write `model.quantization`.", "quantization_method", "bits")
    draft.drop("bitsandbytes, as here", "quantization_method")
    _rows(draft)
    name_placeholders(draft)
    draft.default(
        "train.precision", "bf16", "the dtype of the model's config there"
    ) if "dtype" not in draft.facts else None


def _task(draft: Draft) -> None:
    rlhf, task_type = str(draft.get("rlhf_type", "")).lower(), str(draft.get("task_type", "causal_lm")).lower()
    preference = ("beta", "sft_weight", "target_margin", "loss")
    if rlhf in _LOSSES:
        draft.put("task.name", "preference", "rlhf_type")
        draft.put("task.preference.loss", _LOSSES[rlhf], "rlhf_type")
        for name in ("beta", "sft_weight"):
            if name in draft.facts and (rlhf, name) != ("simpo", "sft_weight"):
                draft.put(f"task.preference.{name}", draft.get(name), name)
        if rlhf == "simpo" and "target_margin" in draft.facts:
            draft.put("task.preference.target_margin", draft.get("target_margin"), "target_margin")
        if draft.get("loss") not in (None, rlhf, "sigmoid"):
            draft.refuse("choose one of `task.preference.loss`.", "loss")
    elif rlhf == "rm":
        draft.put("task.name", "reward", "rlhf_type")
    elif rlhf == "gkd" or draft.get("teacher"):
        draft.put("task.name", "distillation", "rlhf_type")
        draft.put("task.distillation.teacher", draft.get("teacher", "TEACHER"), "teacher")
        draft.put("task.distillation.divergence", "jsd", comment="as there, with weight `beta`")
        draft.put("task.distillation.jsd_beta", draft.get("beta", 0.5), "beta")
    else:
        draft.put("task.name", _TASKS.get(task_type, "sft"), "task_type")
        if rlhf:
            draft.out_of_scope = f"rlhf_type: {rlhf}"
            draft.refuse("reinforcement learning is not a task here: use the Session API.", "rlhf_type")
    draft.drop("another task is trained", *preference, "task_type", "teacher")


def _rows(draft: Draft) -> None:
    names = draft.get("dataset", [])
    for index, written in enumerate(names):
        match = _DATASET.fullmatch(written)
        key = "data.train" if len(names) == 1 else f"data.train.mix.{index}"
        parts = match.groupdict() if match is not None else {"name": written, "config": None, "take": None}
        values = source_of(str(parts["name"]), draft.file.path.parent)
        values |= {"config": parts["config"], "take": int(parts["take"]) if parts["take"] else None}
        put_source(draft, key, values, "dataset")
        if len(names) > 1:
            draft.put(f"{key}.epochs", 1, comment="all rows of every source, as there")
    if names:
        draft.note("names of rows and models are those of ModelScope there without `use_hf`: look them up on the hub.")
    if draft.get("eval_dataset"):
        match = _DATASET.fullmatch(draft.get("eval_dataset")[0])
        name = match["name"] if match is not None else draft.get("eval_dataset")[0]
        put_source(draft, "data.validation", source_of(name, draft.file.path.parent), "eval_dataset")
    if draft.get("streaming"):
        draft.put("data.train.stream.window_rows", draft.get("window_rows", 10_000), "window_rows", "streaming")
    draft.drop("rows are not streamed", "streaming", "window_rows")
    targets = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
    if draft.get("loss_scale") in targets and draft.value("task.name") == "sft":
        draft.put("data.train_on", targets[draft.get("loss_scale")], "loss_scale")
    elif draft.get("loss_scale") not in (None, "default"):
        draft.refuse("weights of turns have no counterpart: choose one of `data.train_on`.", "loss_scale")
    draft.drop("the assistant's turns are the targets", "loss_scale")
    if draft.get("packing") and draft.value("task.name") in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
    if "thinking" in draft.facts:
        draft.put("data.chat_template_arguments", {"enable_thinking": draft.get("thinking")}, "thinking")


def finish(draft: Draft) -> None:
    """Write ms-swift's own defaults."""
    finish_arguments(draft, learning_rate=1e-4 if draft.has("model.lora") else 1e-5)
    draft.default("data.max_length", 4096, "the model's length there: write yours")
    draft.default("data.over_length", "drop", "as there")
    draft.note("rows longer than `max_length` are left out there; here they are, and counted.")


MS_SWIFT = Peer(
    name="ms_swift",
    title="ms-swift",
    table=TABLE,
    signs=frozenset(
        {
            "tuner_type",
            "train_type",
            "sft_type",
            "torch_dtype",
            "split_dataset_ratio",
            "attn_impl",
            "quant_bits",
            "rlhf_type",
            "loss_scale",
            "target_modules",
            "truncation_strategy",
            "use_hf",
            "val_dataset",
            "model_author",
        }
    ),
    prepare=prepare,
    finish=finish,
)
