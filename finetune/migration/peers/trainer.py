"""transformers' Trainer, whose arguments TRL and LLaMA-Factory have, too; and TRL itself."""

import json
from pathlib import Path
from typing import Any

from finetune.migration.complete import put_source, source_of, source_with_files
from finetune.migration.draft import Draft, KeyOutcome, PeerTrainer
from finetune.migration.rules import OWN_LOSS, path, read_file
from finetune.migration.source import is_present
from finetune.registry.losses import PREFERENCE_LOSSES


def prepare_arguments(draft: Draft) -> None:
    """Write what only Trainer's arguments have; run it before the common part."""
    if draft.get("finds_batch"):
        draft.refuse("write `train.microbatch_size: auto`, which keeps the batch of a step.", "finds_batch")
    if draft.get("sampling") == "group_by_length":
        draft.put("data.batching.length_window_steps", 16, "sampling")
    elif draft.get("sampling") == "sequential":
        draft.put("data.shuffle", False, "sampling")
    if (draft.get("beta1", 0.9), draft.get("beta2", 0.999)) != (0.9, 0.999):
        draft.put("train.optimizer.betas", [draft.get("beta1", 0.9), draft.get("beta2", 0.999)], "beta1", "beta2")
    steps = draft.get("logging_steps", 500)
    if steps >= 1 and "logging_steps" in draft.facts:
        draft.put("report.log_every_steps", int(steps), "logging_steps")
    if draft.get("eval_strategy") == "steps" and draft.get("eval_steps") is None and steps >= 1:
        comment = "as often as `logging_steps`, since `eval_steps` is unset"
        draft.put("evaluate.every_steps", int(steps), "eval_strategy", comment=comment)
    if draft.get("pushes") and draft.get("hub_name"):
        draft.put("export.push_to_hub", draft.get("hub_name"), "hub_name", "pushes")
        if draft.get("hub_private") is False:
            draft.put("export.private", False, "hub_private")
    elif draft.get("pushes"):
        draft.refuse("write the repository's name in `export.push_to_hub`.", "pushes")
    settings = {key: leaf for key, leaf in draft.file.leaves.items() if key.startswith("deepspeed.")}
    if settings:
        draft.facts["deepspeed"] = (draft.file.values["deepspeed"], next(iter(settings.values())))
        for key in settings:
            draft.outcomes[key] = KeyOutcome(
                "mapped", "accelerate file and its DeepSpeed config, which has our settings"
            )
    if draft.get("trackers") and draft.get("project"):
        draft.put("report.project", draft.get("project"), "project")


def finish_arguments(draft: Draft) -> None:
    """Note what Trainer does at the end of an epoch."""
    draft.note("Trainer takes a step with the last, incomplete batch of an epoch; here batches go on over epochs.")


def _prepare_trainer(draft: Draft) -> None:
    """Write the keys that a job needs and the arguments do not give."""
    prepare_arguments(draft)
    name_placeholders(draft)
    draft.default("task.name", "sft", "the arguments do not name the task: write it (docs/how-to/tasks.md)")
    draft.default("data.max_length", 1024, "the arguments do not have it: write it")
    draft.default("data.over_length", "truncate", "as with `truncation=True`")


PLACEHOLDERS = ("MODEL", "DATASET")
"""Names that are to be replaced in a job."""


def name_placeholders(draft: Draft) -> None:
    """Write names to be replaced, where the file names neither model nor rows."""
    draft.default("model.name", "MODEL", "not in the file: write the name or the path")
    if not draft.has("data.train"):
        draft.default("data.train.name", "DATASET", "not in the file: write the name, or `path`")
    if "MODEL" in (draft.value("model.name"), draft.value("data.train.name")):
        draft.note("the model or the rows are in a script: write their names in place of MODEL and DATASET.")


TRAINER = PeerTrainer(name="trainer", prepare=_prepare_trainer, finish=finish_arguments)


_MAX_ROW = 1 << 20


def _prepare_trl(draft: Draft) -> None:
    """Write the task, its loss, the rows and the adapter."""
    keys, name = draft.file.leaves.keys(), draft.file.path.stem.lower()
    commands: list[dict[str, str]] = read_file("trl")["commands"]
    by_name = [one for one in commands if "name" in one and one["name"] in name]
    by_keys = [one for one in commands if keys & set(one.get("keys", "").split())]
    command = [*by_name, *by_keys, commands[-1]][0]
    draft.assume(f"trl {command['config']}")
    prepare_arguments(draft)
    _task(draft, command)
    _rows(draft)
    name_placeholders(draft)
    if draft.get("uses_peft"):
        draft.facts["adapter"] = ("lora", draft.facts["uses_peft"][1])
        draft.default("model.lora.target_modules", ["q_proj", "v_proj"], "peft's default for most models")
    template = draft.get("template_path")
    if template is not None and is_present(Path(template)):
        draft.put("data.chat_template", path(template), "template_path")
    elif template is not None:
        draft.put("model.tokenizer.name", template, "template_path", comment="for its chat template")
    if draft.get("bf16") is None and not draft.get("fp16"):
        draft.default("train.precision", "bf16", "TRL's default, unless `fp16` is set")


def _task(draft: Draft, command: dict[str, str]) -> None:
    losses = [loss.lower() for loss in draft.get("loss", [])]
    comment = "by the file's name or keys: TRL's command is not in it"
    if command["task"] == "preference":
        draft.put("task.name", "preference", comment=comment)
        is_written = "loss" in draft.facts and losses != ["sigmoid"]
        _preference(draft, losses if is_written else [command["loss"]])
    elif command["task"] == "distillation":
        draft.put("task.name", "distillation", "teacher", comment=comment)
        _distillation(draft)
    else:
        draft.put("task.name", command["task"], comment=comment)
    if command["task"] == "sft" and losses and losses[0] not in ("nll", "chunked_nll"):
        draft.refuse(OWN_LOSS, "loss")
    if draft.get("divergence", "reverse_kl") != "reverse_kl":
        draft.refuse("only the reverse KL divergence of DPO has a counterpart: leave it out.", "divergence")


def _preference(draft: Draft, losses: list[str]) -> None:
    weights = draft.get("loss_weights") or [1.0] * len(losses)
    renamed = ["kto" if loss == "apo_zero_unpaired" else loss for loss in losses]
    by_loss: dict[str, Any] = dict(zip(renamed, weights, strict=False))
    sft_weight = by_loss.pop("sft", None)
    known = [loss for loss in by_loss if loss in PREFERENCE_LOSSES]
    if "apo_zero_unpaired" in losses:
        draft.refuse("`apo_zero` is that loss for pairs, `kto` that of answers without pairs.", "loss")
    if len(by_loss) == 1 and known:
        draft.put("task.preference.loss", known[0], *(() if draft.is_named("loss") else ("loss", "loss_weights")))
        if sft_weight is not None:
            draft.put("task.preference.sft_weight", sft_weight / by_loss[known[0]], "loss_weights", "loss")
    else:
        names = ", ".join(entry.name for entry in PREFERENCE_LOSSES)
        draft.put("task.preference.loss", "sigmoid", comment="the file has a loss without a counterpart")
        draft.refuse(f"choose one of `task.preference.loss`: {names}; a plugin adds others.", "loss", "loss_weights")
    draft.put("task.preference.beta", draft.get("beta"), "beta")
    if draft.get("preference_smoothing"):
        draft.put("task.preference.label_smoothing", draft.get("preference_smoothing"), "preference_smoothing")
    if draft.value("task.preference.loss") == "simpo":
        draft.put("task.preference.target_margin", draft.get("target_margin"), "target_margin")
    if draft.get("sft_weight") is not None and sft_weight is None:
        draft.put("task.preference.sft_weight", draft.get("sft_weight"), "sft_weight")


def _distillation(draft: Draft) -> None:
    if "teacher" in draft.facts:
        draft.put("task.distillation.teacher", draft.get("teacher"), "teacher")
    beta, share = draft.get("beta"), draft.get("on_policy")
    divergence = "forward_kl" if beta == 0 else "reverse_kl" if beta == 1 else "jsd"
    draft.put("task.distillation.divergence", divergence, "beta")
    if divergence == "jsd":
        draft.put("task.distillation.jsd_beta", beta, "beta")
    draft.put("data.train_on", "last_assistant", comment="GKD trains the last answer of a conversation alone")
    if share:
        what = f"texts of the student are generated and trained on in {share:.0%} of the steps in TRL"
        draft.refuse(f"{what}: not possible here, the rows' answers are trained on.", "on_policy")
        if "on_policy" not in draft.facts:
            draft.note(
                f"{what} ({draft.assumed['on_policy'][1]} is unwritten): that is not possible here, and the rows' "
                "answers are trained on in every step. `lmbda: 0` is the same in TRL."
            )


def _rows(draft: Draft) -> None:
    task, folder, row = draft.value("task.name"), draft.file.path.parent, _first_row(draft)
    field = draft.get("text_field", "text")
    if task == "sft" and (field in row or (not row and field != "text")):
        draft.put("task.name", "pretrain", "text_field", comment="every token of a text is a target, as in TRL")
        draft.put("data.train.columns", {"text": field}, "text_field")
        draft.put("data.train.format", "text", "text_field")
        task = "pretrain"
    if isinstance(row.get("prompt"), str):
        draft.put("data.chat_template", "plain", comment="texts in `prompt` are not put into the chat template in TRL")
    elif not row and task != "pretrain":
        draft.note(
            "lists of messages are put into the chat template in TRL, texts in `prompt` are not: for texts, write "
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
        parts = {name: draft.get(f"mix_{name}.{position}") for name in ("path", "files", "config", "split")}
        values = source_with_files(parts["path"], parts["files"], folder)
        values |= {"config": parts["config"], "split": parts["split"]} | ({"format": "judged"} if is_judged else {})
        put_source(draft, key, values, *(f"mix_{name}.{position}" for name in (*parts, "columns")))
        if len(positions) > 1:
            draft.put(f"{key}.epochs", 1, comment="all rows of every source, as in TRL")
    if is_judged and not row:
        draft.note("rows of pairs are split into two in TRL; if yours have `chosen`, remove `data.train.format`.")
    if draft.get("eval_strategy", "no") != "no" and "dataset" in draft.facts:
        split = draft.get("test_split", "test")
        values = source_of(draft.get("dataset"), folder) | {"config": draft.get("config"), "split": split}
        values |= {"format": "judged"} if is_judged else {}
        put_source(draft, "data.validation", values, "test_split")
    if draft.get("streaming"):
        draft.put("data.train.stream.window_rows", 10_000, "streaming")
    if task == "sft":
        _targets(draft, row)
    if draft.get("packing") and task in ("sft", "pretrain"):
        draft.put("data.batching.by", "packs", "packing")
        if draft.get("packing_strategy") == "wrapped":
            draft.note(
                "`wrapped` packs cut samples, whose parts attend to each other; here packs hold whole samples only."
            )
        else:
            draft.note("packed samples do not attend to each other here; in TRL, only flash attention isolates them.")


def _first_row(draft: Draft) -> dict[str, Any]:
    """Return the first row of a local file of JSON lines, whose columns say what TRL does; else an empty one."""
    written, folder = draft.get("dataset") or draft.get("mix_path.0"), draft.file.path.parent
    if not written:
        return {}
    found = source_with_files(written, draft.get("mix_files.0"), folder).get("path")
    path = Path(found or "")
    files = sorted(path.glob("*.jsonl")) if found and is_present(path, Path.is_dir) else [path]
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
            "every token of `messages` is a target in TRL unless `assistant_only_loss`, prompts too; of rows with "
            "prompt and completion, the completion alone: for those, remove `data.train_on`."
        )
    else:
        draft.put("data.train_on", "all", "completion_only", "assistant_only")


def _finish_trl(draft: Draft) -> None:
    """Write what happens to long rows."""
    finish_arguments(draft)
    is_dropped = draft.value("task.name") == "reward"
    draft.default("data.over_length", "drop" if is_dropped else "truncate", "as in TRL")
    what = "left out" if is_dropped else "truncated"
    draft.note(f"rows longer than `max_length` are {what} in TRL without a message; here they are counted.")


TRL = PeerTrainer(name="trl", prepare=_prepare_trl, finish=_finish_trl)
