"""TRL: its keys, the task by the keys of its configs, its rows and losses, and its defaults."""

import json
from pathlib import Path
from typing import Any

from finetune.migration.complete import put_source, source_of
from finetune.migration.draft import Draft, Peer
from finetune.migration.peers.trainer import finish_arguments, name_placeholders, prepare_arguments
from finetune.migration.rules import (
    attention,
    dtype,
    each,
    fact,
    modules,
    no,
    number,
    numbers,
    ours,
    path,
    positive,
    text,
    to,
    truth,
    whole,
    words,
)
from finetune.migration.tables.trainer import TRAINER
from finetune.registry.losses import PREFERENCE_LOSSES

_REFERENCE = "the model before training, or without adapters, is the reference; its log-probabilities are computed once"
_ONLINE_REMEDY = "online reinforcement learning is not a task here: use the Session API (docs/how-to/session.md)."
_PADDING = "padding is never a target"
_QUANTIZED = "bitsandbytes' own default"

TABLE = {
    **TRAINER,
    # model
    "model_name_or_path": to("model.name", text),
    "model_revision": to("model.revision", lambda value: None if value == "main" else text(value)),
    "dtype": fact("dtype", lambda value: dtype("float32" if value == "auto" else value)),
    "torch_dtype": fact("dtype", lambda value: dtype("float32" if value == "auto" else value)),
    "attn_implementation": to("model.attention", attention),
    "trust_remote_code": to("model.trust_remote_code", truth),
    "model_init_kwargs": ours("it is empty"),
    "model_init_kwargs.torch_dtype": fact("dtype", dtype),
    "model_init_kwargs.dtype": fact("dtype", dtype),
    "model_init_kwargs.attn_implementation": to("model.attention", attention),
    "model_init_kwargs.revision": to("model.revision", text),
    "model_init_kwargs.*": no("write it in `model`, or in `model.config`."),
    "ref_model_init_kwargs": ours(_REFERENCE),
    "ref_model_init_kwargs.*": ours(_REFERENCE),
    "model_adapter_name": ours(_REFERENCE),
    "ref_adapter_name": ours(_REFERENCE),
    "use_peft": fact("uses_peft", truth),
    "lora_r": to("model.lora.rank", positive),
    "lora_alpha": to("model.lora.alpha", number),
    "lora_dropout": to("model.lora.dropout", number),
    "lora_target_modules": to("model.lora.target_modules", modules),
    "lora_target_parameters": no("write `model.lora.experts: true` for routed experts."),
    "lora_modules_to_save": to("model.lora.modules_to_save", words),
    "lora_task_type": ours("the head follows from the task"),
    "use_rslora": to("model.lora.rslora", truth),
    "use_dora": to("model.lora.dora", truth),
    "load_in_4bit": fact("is_4bit", truth),
    "load_in_8bit": fact("is_8bit", truth),
    "bnb_4bit_quant_type": to("model.quantization.kind", text),
    "use_bnb_nested_quant": to("model.quantization.double", truth),
    "bnb_4bit_quant_storage": ours(_QUANTIZED),
    "disable_dropout": ours("models of today have no dropout; `model.config: {attention_dropout: 0.0}` sets it"),
    # data
    "dataset_name": fact("dataset", text),
    "dataset_config": fact("config", text),
    "dataset_config_name": fact("config", text),
    "dataset_train_split": fact("split", text),
    "dataset_test_split": fact("test_split", text),
    "dataset_streaming": fact("streaming", truth),
    "streaming": fact("streaming", truth),
    "datasets[].path": fact("mix_path", text),
    "datasets[].name": fact("mix_config", text),
    "datasets[].split": fact("mix_split", text),
    "datasets[].columns": fact("mix_columns", words),
    "datasets[].data_dir": no("write it in the path: `hf://datasets/OWNER/NAME/FOLDER/*.parquet`."),
    "datasets[].data_files": no("write it in the path: `hf://datasets/OWNER/NAME/FILE`."),
    "test_split_size": fact("validation_fraction", number),
    "dataset_text_field": fact("text_field", text),
    "dataset_num_proc": to("data.prepare_workers", whole),
    "dataset_kwargs": ours("it is empty"),
    "dataset_kwargs.*": no("rows that are tokenized already are not read: write rows of text."),
    "dataset_batch_size": ours("rows are tokenized in parallel: `data.prepare_workers`"),
    "max_length": to("data.max_length", positive),
    "max_seq_length": to("data.max_length", positive),
    "max_prompt_length": ours("prompt and answer are cut together, at `data.max_length`"),
    "max_completion_length": ours("prompt and answer are cut together, at `data.max_length`"),
    "truncation_mode": to("data.truncate_side", lambda value: "start" if value == "keep_end" else "end"),
    "chat_template_path": fact("template_path", text),
    "eos_token": ours("the end of the assistant's turn, as the chat template writes it, is a target"),
    **each(ours(_PADDING), "pad_token pad_to_multiple_of label_pad_token_id padding_value"),
    "packing": fact("packing", truth),
    "packing_strategy": fact("packing_strategy", text),
    "eval_packing": ours("validation rows are packed as training rows are"),
    "padding_free": to("data.batching.padding_free", truth),
    "shuffle_dataset": ours("samples are shuffled in every epoch"),
    "completion_only_loss": fact("completion_only", truth),
    "assistant_only_loss": fact("assistant_only", truth),
    "activation_offloading": to("model.activation_offload", truth),
    "router_aux_loss_coef": to("train.router_aux_loss", number),
    # losses
    "loss_type": fact("loss", words),
    "loss_weights": fact("loss_weights", numbers),
    "beta": fact("beta", number),
    "label_smoothing": fact("preference_smoothing", number),
    "rpo_alpha": fact("sft_weight", number),
    "cpo_alpha": fact("sft_weight", number),
    "simpo_gamma": fact("target_margin", number),
    "desirable_weight": to("task.preference.desirable_weight", number),
    "undesirable_weight": to("task.preference.undesirable_weight", number),
    "center_rewards_coefficient": to("task.reward.centering", number),
    "f_divergence_type": fact("divergence", lambda value: text(value).rpartition(".")[2].lower()),
    "f_alpha_divergence_coef": fact("divergence_alpha", number),
    "discopop_tau": fact("discopop", number),
    "use_weighting": no("weighted DPO has no counterpart: choose another `task.preference.loss`."),
    "ld_alpha": no("LD-DPO has no counterpart: `ipo` and `simpo` divide by the length."),
    "reference_free": no("choose `simpo`, `orpo` or `cpo`, which need no reference."),
    "sync_ref_model": no("a reference that follows the model has no counterpart."),
    **each(ours("they are read with `sync_ref_model` alone"), "ref_model_mixup_alpha ref_model_sync_steps"),
    **each(ours(_REFERENCE), "precompute_ref_log_probs precompute_ref_batch_size force_use_ref_model"),
    **each(ours("the model writes end-of-sequence as trained"), "generate_during_eval is_encoder_decoder"),
    # distillation
    "teacher_model_name_or_path": fact("teacher", text),
    "teacher_model_init_kwargs.*": no("write `task.distillation.teacher_dtype`."),
    "temperature": fact("temperature", number),
    "lmbda": fact("on_policy", number),
    "seq_kd": no("distillation on the teacher's own texts: generate them first, and train `sft` on them."),
    "max_new_tokens": ours("no text is generated in training"),
    # online methods
    **each(no(_ONLINE_REMEDY), "num_generations reward_funcs reward_weights epsilon epsilon_high num_iterations"),
    **each(no(_ONLINE_REMEDY), "use_vllm vllm_mode vllm_server_base_url vllm_gpu_memory_utilization reward_model_path"),
    **each(no(_ONLINE_REMEDY), "scale_rewards generation_batch_size steps_per_generation importance_sampling_level"),
    "env.*": ours("set the variables in the shell"),
    "config": ours("it names this file"),
    "ignore_bias_buffers": ours("buffers are not exchanged"),
    "gradient_accumulation_kwargs.*": ours("accumulation follows from `train.global_batch_size`"),
}
"""From TRL's keys to what becomes of them."""


_LEARNING_RATES = {"sft": 2e-5, "pretrain": 2e-5, "preference": 1e-6, "reward": 1e-4, "distillation": 1e-7}
_ONLINE = ("num_generations", "reward_funcs", "num_iterations", "epsilon", "reward_model_path", "use_vllm")
_MAX_ROW = 1 << 20
_PREFERENCE = ("beta", "preference_smoothing", "sft_weight", "target_margin")


def prepare(draft: Draft) -> None:
    """Write the task, its loss, the rows and the adapter."""
    prepare_arguments(draft)
    _task(draft)
    _rows(draft)
    name_placeholders(draft)
    if draft.get("uses_peft") or (draft.has("model.lora") and "uses_peft" not in draft.facts):
        leaf = draft.facts.get("uses_peft", (True, next(iter(draft.file.leaves.values()))))[1]
        draft.facts["adapter"] = ("lora", leaf)
        draft.default("model.lora.target_modules", ["q_proj", "v_proj"], "peft's default for most models")
        draft.default("model.lora.dropout", 0.05, "TRL's default")
    draft.drop("every parameter is trained, as here by default", "uses_peft")
    template = draft.get("template_path")
    if template is not None and Path(template).is_file():
        draft.put("data.chat_template", path(template), "template_path")
    elif template is not None:
        draft.put("model.tokenizer.name", template, "template_path", comment="for its chat template")
    if draft.get("bf16") is None and not draft.get("fp16"):
        draft.default("train.precision", "bf16", "TRL's default")
    draft.default("model.gradient_checkpointing", True, "TRL's default")


def _task(draft: Draft) -> None:
    """Write task and loss: the command is not in the file, so its keys decide, or else its name."""
    keys, name = draft.file.leaves.keys(), draft.file.path.stem.lower()
    losses = [loss.lower() for loss in draft.get("loss", [])]
    if keys & set(_ONLINE):
        draft.out_of_scope = "reinforcement learning"
    is_dpo = "dpo" in name or bool(keys & {"precompute_ref_log_probs", "f_divergence_type", "max_prompt_length"})
    is_dpo = is_dpo or ("beta" in keys and "teacher_model_name_or_path" not in keys)
    if "kto" in name or keys & {"desirable_weight", "undesirable_weight"}:
        _preference(draft, ["kto" if loss == "apo_zero_unpaired" else loss for loss in losses] or ["kto"])
    elif "orpo" in name or "cpo" in name or "simpo" in name or "cpo_alpha" in keys or "simpo_gamma" in keys:
        own = "orpo" if "orpo" in name else "simpo" if "simpo" in name or "simpo_gamma" in keys else "cpo"
        _preference(draft, losses if losses and losses != ["sigmoid"] else [own])
    elif is_dpo:
        _preference(draft, losses or ["sigmoid"])
    elif "reward" in name or "center_rewards_coefficient" in keys:
        draft.put("task.name", "reward", comment="by the keys of the file")
    elif "teacher" in draft.facts:
        draft.put("task.name", "distillation", "teacher")
        _distillation(draft)
    else:
        draft.put("task.name", "sft", comment="by the keys of the file: TRL's command is not in it")
        if losses and losses[0] not in ("nll", "chunked_nll"):
            draft.out_of_scope = draft.out_of_scope or f"the loss {losses[0]}"
            draft.refuse("a plugin adds a loss of tokens as `task.loss` (docs/how-to/plugins.md).", "loss")
    draft.drop("the cross-entropy over the targets, in chunks where they are many", "loss", "loss_weights")
    if draft.get("divergence", "reverse_kl") != "reverse_kl":
        draft.refuse("only the reverse KL divergence of DPO has a counterpart: leave it out.", "divergence")
    draft.drop(
        "the default there and here, or of a loss that is not chosen", "divergence", "divergence_alpha", "discopop"
    )
    draft.drop("another task is trained", *_PREFERENCE, "temperature", "on_policy", "teacher")


def _preference(draft: Draft, losses: list[str]) -> None:
    draft.put("task.name", "preference", comment="by the keys of the file")
    weights = draft.get("loss_weights") or [1.0] * len(losses)
    by_loss: dict[str, Any] = dict(zip(losses, weights, strict=False))
    sft_weight = by_loss.pop("sft", None)
    known = [loss for loss in by_loss if loss in PREFERENCE_LOSSES]
    if len(by_loss) == 1 and known:
        draft.put("task.preference.loss", known[0], "loss", "loss_weights")
        if sft_weight is not None:
            draft.put("task.preference.sft_weight", sft_weight / by_loss[known[0]], "loss_weights", "loss")
    else:
        names = ", ".join(entry.name for entry in PREFERENCE_LOSSES)
        draft.put("task.preference.loss", "sigmoid", comment="the file has a loss without a counterpart")
        draft.refuse(f"choose one of `task.preference.loss`: {names}; a plugin adds others.", "loss", "loss_weights")
    draft.put("task.preference.beta", draft.get("beta", 0.1), "beta")
    if draft.get("preference_smoothing"):
        draft.put("task.preference.label_smoothing", draft.get("preference_smoothing"), "preference_smoothing")
    if draft.get("target_margin") is not None and draft.value("task.preference.loss") == "simpo":
        draft.put("task.preference.target_margin", draft.get("target_margin"), "target_margin")
    if draft.get("sft_weight") is not None and sft_weight is None and draft.value("task.preference.loss") != "simpo":
        draft.put("task.preference.sft_weight", draft.get("sft_weight"), "sft_weight")


def _distillation(draft: Draft) -> None:
    draft.put("task.distillation.teacher", draft.get("teacher"), "teacher")
    beta = draft.get("beta", 0.5)
    divergence = "forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else "jsd"
    draft.put("task.distillation.divergence", divergence, "beta")
    if divergence == "jsd":
        draft.put("task.distillation.jsd_beta", beta, "beta")
    if "temperature" in draft.facts:
        draft.put("task.distillation.temperature", draft.get("temperature"), "temperature")
    if draft.get("on_policy"):
        draft.refuse(
            "texts of the student are not generated in training: the rows' answers are trained on.", "on_policy"
        )


def _rows(draft: Draft) -> None:
    task, folder, row = draft.value("task.name"), draft.file.path.parent, _first_row(draft)
    field = draft.get("text_field", "text")
    if task == "sft" and (field in row or (not row and field != "text")):
        draft.put("task.name", "pretrain", "text_field", comment="every token of a text is a target, as there")
        draft.put("data.train.columns", {"text": field}, "text_field")
        draft.put("data.train.format", "text", "text_field")
        task = "pretrain"
    draft.drop("the first row's columns decide", "text_field")
    if isinstance(row.get("prompt"), str):
        draft.put("data.chat_template", "plain", comment="texts in `prompt` are not put into the chat template there")
    elif not row and task != "pretrain":
        draft.note(
            "lists of messages are put into the chat template there, texts in `prompt` are not: for texts, write "
            "`data.chat_template: plain`."
        )
    is_judged = draft.value("task.preference.loss") == "kto" and "chosen" not in row
    if "dataset" in draft.facts:
        values = source_of(draft.get("dataset"), folder) | {"config": draft.get("config"), "split": draft.get("split")}
        values |= {"format": "judged"} if is_judged else {}
        put_source(draft, "data.train", values, "dataset", "config", "split")
    positions = sorted(int(name.rpartition(".")[2]) for name in draft.facts if name.startswith("mix_path."))
    for index, position in enumerate(positions):
        key = "data.train" if len(positions) == 1 else f"data.train.mix.{index}"
        parts = {name: draft.get(f"mix_{name}.{position}") for name in ("path", "config", "split")}
        values = source_of(parts["path"], folder) | {"config": parts["config"], "split": parts["split"]}
        put_source(draft, key, values, *(f"mix_{name}.{position}" for name in ("path", "config", "split", "columns")))
        draft.drop("columns that the format does not read are ignored", f"mix_columns.{position}")
        if len(positions) > 1:
            draft.put(f"{key}.epochs", 1, comment="all rows of every source, as there")
    if is_judged and not row:
        draft.note("rows of pairs are split into two there; if yours have `chosen`, remove `data.train.format`.")
    if draft.get("eval_strategy", "no") != "no" and "dataset" in draft.facts:
        split = draft.get("test_split", "test")
        values = source_of(draft.get("dataset"), folder) | {"config": draft.get("config"), "split": split}
        values |= {"format": "judged"} if is_judged else {}
        put_source(draft, "data.validation", values, "test_split")
    draft.drop("nothing is evaluated there", "test_split")
    if draft.get("streaming"):
        draft.put("data.train.stream.window_rows", 10_000, "streaming")
    draft.drop("rows are not streamed", "streaming")
    if task == "sft":
        _targets(draft, row)
    draft.drop("answers are the targets of this task", "completion_only", "assistant_only")
    if draft.get("packing") and task in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
        if draft.get("packing_strategy") == "wrapped":
            draft.note(
                "`wrapped` packs cut samples, whose parts attend to each other; here packs hold whole samples only."
            )
        else:
            draft.note(
                "packed samples do not attend to each other here; there, only flash attention keeps them isolated."
            )
    draft.drop("packs hold whole samples, best fit first", "packing_strategy")


def _first_row(draft: Draft) -> dict[str, Any]:
    """Return the first row of a local file of JSON lines, whose columns say what TRL does; else an empty one."""
    written = draft.get("dataset") or draft.get("mix_path.0")
    if not written:
        return {}
    path = Path(source_of(written, draft.file.path.parent).get("path", ""))
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    try:
        with files[0].open(encoding="utf-8") as file:
            row = json.loads(file.readline(_MAX_ROW))
    except (OSError, ValueError, IndexError):
        return {}  # on the hub, or of another kind
    return row if isinstance(row, dict) else {}


def _targets(draft: Draft, row: dict[str, Any]) -> None:
    """Write the targets: TRL's default is every token of a conversation, and of prompt and completion the answer."""
    if draft.get("assistant_only") or draft.get("completion_only"):
        draft.put("data.train_on", "assistant", "assistant_only", "completion_only")
    elif draft.get("completion_only") is None and "prompt" in row:
        draft.put("data.train_on", "assistant", "assistant_only", comment="TRL's default for prompt and completion")
    elif draft.get("completion_only") is None:
        draft.put("data.train_on", "all", "assistant_only", comment="TRL's default for `messages`")
        draft.note(
            "every token of `messages` is a target there unless `assistant_only_loss`, prompts too; of rows with "
            "prompt and completion, the completion alone: for those, remove `data.train_on`."
        )
    else:
        draft.put("data.train_on", "all", "completion_only", "assistant_only")


def finish(draft: Draft) -> None:
    """Write TRL's own defaults."""
    finish_arguments(draft, learning_rate=_LEARNING_RATES.get(str(draft.value("task.name")), 2e-5))
    draft.default("data.max_length", 1024, "TRL's default")
    is_dropped = draft.value("task.name") == "reward"
    draft.default("data.over_length", "drop" if is_dropped else "truncate", "as there")
    what = "left out" if is_dropped else "truncated"
    draft.note(f"rows longer than `max_length` are {what} there without a message; here they are counted.")


TRL = Peer(
    name="trl",
    title="TRL",
    table=TABLE,
    signs=frozenset(
        {
            "dataset_name",
            "use_peft",
            "dataset_train_split",
            "dataset_text_field",
            "dataset_num_proc",
            "loss_type",
            "completion_only_loss",
            "assistant_only_loss",
            "precompute_ref_log_probs",
            "center_rewards_coefficient",
            "desirable_weight",
            "model_init_kwargs",
            "chat_template_path",
            "truncation_mode",
            "max_prompt_length",
            "beta",
            "max_seq_length",
            "pad_to_multiple_of",
            "disable_dropout",
            "activation_offloading",
        }
    ),
    prepare=prepare,
    finish=finish,
)
