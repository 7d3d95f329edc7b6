"""ms-swift: its keys and tasks, its datasets with `#rows` in their names, and its defaults."""

import re

from finetune.migration.complete import put_source, source_of
from finetune.migration.draft import Draft, Peer
from finetune.migration.peers.trainer import finish_arguments, name_placeholders, prepare_arguments
from finetune.migration.rules import (
    ANSWERS,
    CACHED,
    RL,
    attention,
    dtype,
    each,
    fact,
    flag,
    modules,
    no,
    number,
    ours,
    over_length,
    positive,
    text,
    to,
    truth,
    whole,
    words,
)
from finetune.migration.tables.trainer import TRAINER

_HUB = "models and rows are read from the Hugging Face hub"
_CARD = "the model card in `final/` names the training data"

TABLE = {
    **TRAINER,
    "model": to("model.name", text),
    "model_type": ours("the class follows from the model's config"),
    "model_revision": to("model.revision", text),
    "torch_dtype": fact("dtype", dtype),
    "attn_impl": to("model.attention", attention),
    "rope_scaling": no("write `model.rope_scaling`: {rope_type: yarn or linear, factor: ...}."),
    "max_model_len": ours("the model's config has it"),
    "task_type": fact("task_type", text),
    "num_labels": ours("the classes are those of the training rows"),
    "problem_type": no("write `task.classification.kind`."),
    "use_hf": ours(_HUB),
    **each(ours(_HUB), "hub_token local_repo_path download_mode custom_register_path external_plugins"),
    "tuner_type": fact("adapter_type", text),
    "train_type": fact("adapter_type", text),
    "sft_type": fact("adapter_type", text),
    "tuner_backend": ours("adapters are peft's"),
    "adapters": fact("adapter_path", lambda value: words(value)[0]),
    "lora_rank": to("model.lora.rank", positive),
    "lora_alpha": to("model.lora.alpha", number),
    "lora_dropout": to("model.lora.dropout", number),
    "target_modules": fact("lora_target", modules),
    "target_regex": fact("lora_target", modules),
    "modules_to_save": to("model.lora.modules_to_save", words),
    "lora_bias": ours("biases are not trained"),
    "lora_dtype": ours("adapters are kept in float32"),
    "use_rslora": to("model.lora.rslora", truth),
    "use_dora": to("model.lora.dora", truth),
    "init_weights": no("write `model.lora.init`."),
    "lorap_lr_ratio": to("train.optimizer.lora_plus_ratio", number),
    **each(ours("the vision part is frozen, as far as `all-linear` has no adapter there"), "freeze_vit freeze_aligner"),
    "freeze_llm": no("write `model.freeze`, or the modules in `model.lora.target_modules`."),
    "freeze_parameters": to("model.freeze", words),
    "trainable_parameters": to("model.train_only", words),
    "quant_method": fact("quantization_method", text),
    "quant_bits": fact("bits", whole),
    "bnb_4bit_quant_type": to("model.quantization.kind", text),
    "bnb_4bit_use_double_quant": to("model.quantization.double", truth),
    "bnb_4bit_compute_dtype": to("model.quantization.compute_dtype", dtype),
    "dataset": fact("dataset", words),
    "val_dataset": fact("eval_dataset", words),
    "split_dataset_ratio": fact("validation_fraction", number),
    "columns.*": no("write `columns` at the source, the other way round: {ours: yours}."),
    "streaming": fact("streaming", truth),
    "shuffle_buffer_size": fact("window_rows", positive),
    "interleave_prob": no("write `weight` at each source of `data.train.mix`."),
    "dataset_shuffle": to("data.shuffle", truth),
    "dataset_num_proc": to("data.prepare_workers", whole),
    **each(ours(CACHED), "load_from_cache_file cached_dataset lazy_tokenize strict"),
    "template": ours("the tokenizer's own chat template is used: look with `finetune preview`"),
    "template_backend": ours("chat templates are Jinja"),
    "system": to("data.system_prompt", text),
    "max_length": to("data.max_length", positive),
    "truncation_strategy": to("data.over_length", over_length),
    "max_pixels": to("data.images.max_pixels", positive),
    "enable_thinking": fact("thinking", truth),
    "loss_scale": fact("loss_scale", text),
    "packing": fact("packing", truth),
    "packing_length": to("data.batching.tokens", positive),
    "padding_free": to("data.batching.padding_free", truth),
    "padding_side": ours("padding is never a target"),
    "sequence_parallel_size": fact("sequence_parallel", positive),
    "rlhf_type": fact("rlhf_type", text),
    "beta": fact("beta", number),
    "rpo_alpha": fact("sft_weight", number),
    "cpo_alpha": fact("sft_weight", number),
    "simpo_gamma": fact("target_margin", number),
    "label_smoothing": to("task.preference.label_smoothing", number),
    "desirable_weight": to("task.preference.desirable_weight", number),
    "undesirable_weight": to("task.preference.undesirable_weight", number),
    "center_rewards_coefficient": to("task.reward.centering", number),
    "loss_type": fact("loss", text),
    "ref_model": no("the model before training is the reference: start from that model."),
    "teacher_model": fact("teacher", text),
    "lmbda": no("texts of the student are not generated in training."),
    **each(no(RL), "num_generations reward_funcs reward_model use_vllm vllm_mode"),
    "router_aux_loss_coef": to("train.router_aux_loss", number),
    "use_liger_kernel": to("train.loss_kernel", flag("liger")),
    **each(ours(_CARD), "model_author model_name add_version create_checkpoint_symlink"),
    **each(ours(ANSWERS), "max_new_tokens temperature top_p top_k repetition_penalty stream"),
    "eval_use_evalscope": ours("`finetune evaluate` measures a model on benchmarks"),
    "acc_strategy": ours("the accuracy of tokens is always written"),
}
"""From ms-swift's keys to what becomes of them."""


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
