"""TRL: the task by the keys of its configs, its rows and losses, and its defaults."""

import json
from pathlib import Path
from typing import Any

from finetune.migration.complete import put_source, source_of
from finetune.migration.draft import Draft
from finetune.migration.peers.peer import Peer
from finetune.migration.peers.trainer import finish_arguments, name_placeholders, prepare_arguments
from finetune.migration.rules import path
from finetune.migration.tables.trl import TRL as TABLE
from finetune.registry.losses import PREFERENCE_LOSSES

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
            draft.note("`wrapped` packs cut samples, whose parts see each other; here packs hold whole samples apart.")
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
