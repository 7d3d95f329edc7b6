"""Completion of every peer's config to a job: batch, budget, schedule, precision, adapters, cadence, strategy.

The facts have the same names, whatever the peer calls its keys.
"""

import json
import re
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from typing import Any

from finetune.config.paths import absolute_path, is_path, is_url
from finetune.config.rules.files import first_matches
from finetune.config.schema import branches, node_at
from finetune.migration.draft import OFF, Draft, KeyOutcome
from finetune.migration.rules import is_off
from finetune.migration.rules import path as path_of
from finetune.migration.source import is_present
from finetune.registry.observers import TRACKERS

_USED = ("wandb", "trackio", "swanlab", "mlflow", "tensorboard", "comet_ml")
ADDRESS_FACTS = ("path", "name", "config", "revision", "split", "data_files", "files", "dataset", "take")
SOURCE_KEYS = ("name", "path", "config", "revision", "split", "format", "columns", "template", "take")

_ADAPT = "there: adapt it to the steps of your data"


def complete(draft: Draft) -> None:
    """Write the keys that follow from the facts; run it after the peer's own part, before its defaults."""
    if draft.gpus == 0:  # not given: the fewest that the strategy of the file needs
        is_sharded = draft.is_sharded or any(
            not is_off(draft.get(name)) for name in ("deepspeed", "fsdp", "fsdp_version")
        )
        groups = max(draft.get("sequence_parallel", 1), draft.get("model_parallel", 1))
        draft.gpus = max(groups, 2 if is_sharded else 1)
    _adapter(draft)
    _precision(draft)
    _batch(draft)
    _budget(draft)
    _schedule(draft)
    _evaluation(draft)
    _put_interval(draft, "checkpoint.every_steps", "save", otherwise=500)
    limit = draft.get("save_limit", 0)
    if limit >= 1:
        comment = "at least 2: the newest may still be being written" if limit == 1 else ""
        draft.put("checkpoint.keep_last", max(2, limit), "save_limit", comment=comment)
    names = [name.lower() for name in draft.get("trackers", []) if not is_off(name) and name.lower() != "all"]
    names += [name for name in _USED if draft.get(f"uses_{name}")]
    known = [entry.name for entry in TRACKERS]
    if unknown := [name for name in names if name not in known]:
        draft.refuse(f"`{unknown[0]}` is not one of `report.trackers`: {', '.join(known)}.", "trackers")
    elif names:
        draft.put("report.trackers", list(dict.fromkeys(names)), "trackers", *(f"uses_{name}" for name in names))
    if not draft.has("report.trackers"):
        for key in ("project", "entity", "group", "tags", "run_name"):
            draft.withdraw(f"report.{key}", KeyOutcome("not_needed", "there is no tracker"))
    _strategy(draft)
    for name, (value, _) in draft.facts.items():
        reason = draft.peer.table.left_over.get(name.partition(".")[0], OFF if is_off(value) else None)
        if reason is not None:
            draft.drop(reason, name)
    advice = "it has no effect next to the other keys: look for it in docs/reference/job/."
    draft.refuse(advice, *draft.facts)


def renamed(columns: Mapping[str, str | None]) -> dict[str, str]:
    """Return the columns that have another name in the rows."""
    return {name: theirs for name, theirs in columns.items() if theirs not in (None, "", name)}


def source_of(text: str, folder: Path) -> dict[str, Any]:
    """Return where rows are: a local file or folder, a URL, or else a dataset on the hub."""
    address = locate(text, folder)
    return {"path" if is_url(address) or is_path(address) else "name": address}


def locate(address: str, folder: Path) -> str:
    """Return the absolute path that the text names, seen from the current folder or else from this one.

    A name that is no path in either stays as it is, and so do URLs, absolute paths and those in the home folder.
    """
    if not address.strip() or is_url(address) or address.startswith(("/", "~")):
        return address
    texts = (address, address.replace("\\", "/"))
    candidates = [absolute_path(text, base) for text in texts for base in (Path.cwd(), folder)]
    try:
        for path in candidates:
            if Path(path).exists() or (has_magic(path) and first_matches(Path(path))):
                return path
    except OSError:  # a name that is too long for a file system
        pass
    return candidates[1] if is_path(address) else address


def locate_inputs(draft: Draft) -> None:
    """Make the paths of what the job reads absolute, as the job is in another folder; what it writes stays with it."""
    for key, entry in draft.entries.items():
        if not isinstance(entry.value, str) or key.endswith("folder"):
            continue
        kinds = {branch.get("format") for branch in branches(node_at(key) or {})}
        may_be_bare = "name or path" in kinds and key != "data.chat_template"
        if may_be_bare or (kinds & {"path", "name or path"} and is_path(entry.value)):
            entry.value = locate(entry.value, draft.file.path.parent.absolute())


def source_with_files(address: str, files: str | None, folder: Path) -> dict[str, Any]:
    """Return where the rows of `load_dataset(written, data_files=files)` are."""
    values = source_of(address, folder)
    if files is None:
        return values
    if address in ("json", "csv", "parquet", "arrow", "text"):
        return source_of(files, folder)
    if "name" in values:
        return {"path": f"hf://datasets/{values['name']}/{files}"}
    return {"path": f"{values['path'].rstrip('/')}/{files}"}


def put_source(draft: Draft, key: str, values: dict[str, Any], *facts: str, comment: str = "") -> None:
    """Write a source of rows at our key: where the rows are, from the facts that say so, and how they are read."""
    splits = [name for name in facts if name.partition(".")[0].endswith("split")]
    if "path" in values and values.get("split"):  # files have none
        rows = re.fullmatch(r"train(?:\[:(\d+)\])?", values.pop("split"))
        if rows is None:
            draft.refuse("a file has no splits: write that with these rows in `path`, or `skip` and `take`.", *splits)
            if key == "data.validation":
                draft.refuse("its rows are in another split of the same files: write `data.validation`.", *facts)
                return
        elif rows[1]:
            values["take"] = min(int(rows[1]), values.get("take") or int(rows[1]))
        else:
            draft.drop("a file is one split", *splits)
    facts = tuple(name for name in facts if name in draft.facts and not (name in splits and draft.is_named(name)))
    address = [name for name in facts if re.sub("^(test|mix)_", "", name.partition(".")[0]) in ADDRESS_FACTS]
    others = [name for name in facts if name not in address]
    reading = [name for name in ("format", "columns", "template") if values.get(name)]
    for name in SOURCE_KEYS:
        if values.get(name) in (None, {}, "") or (name, values[name]) == ("split", "train"):
            continue
        is_first = name in ("name", "path")
        origin = address if is_first else others if name in reading[:1] else []
        origin = [*origin, *others] if is_first and not reading else origin
        draft.put(f"{key}.{name}", values[name], *origin, comment=comment if is_first else "")


def _adapter(draft: Draft) -> None:
    kind = {"qlora": "lora"}.get(draft.get("adapter", "full"), draft.get("adapter", "full"))
    bits = 4 if draft.get("is_4bit") else 8 if draft.get("is_8bit") else draft.get("bits")
    if bits is None and draft.get("adapter") == "qlora":
        bits = 4
    if bits is not None and kind == "full":
        draft.refuse("a quantized base is trained through adapters: write `model.lora`.", "is_4bit", "is_8bit", "bits")
    elif bits is not None:
        draft.put("model.quantization.bits", bits, "is_4bit", "is_8bit", "bits")
    if not draft.has("model.quantization.bits"):
        draft.withdraw("model.quantization", KeyOutcome("not_needed", draft.peer.table.left_over["bits"]))
    if draft.get("adapter_path"):
        draft.withdraw("model.lora", KeyOutcome("not_needed", "the config of the adapter in `model.adapter` has it"))
        draft.put("model.adapter", path_of(draft.get("adapter_path")), "adapter_path", "adapter")
        return
    if kind != "lora":
        draft.withdraw("model.lora", KeyOutcome("not_needed", "no such adapter is trained in the file"))
    elif not draft.has("model.lora"):
        draft.put("model.lora", {}, "adapter")
    else:
        draft.mapped("the section `model.lora`", "adapter")


def _precision(draft: Draft) -> None:
    half = next((name for name in ("bf16", "fp16") if draft.get(name)), None)
    trains_adapter = draft.get("adapter", "full") != "full"
    wanted = draft.get("dtype")
    if half is not None:
        draft.put("train.precision", half, half)
    if draft.has("model.dtype"):
        draft.drop("`model.dtype` is chosen by another key", "dtype")
    elif wanted is None and half == "bf16" and (trains_adapter or draft.loads_bf16):
        draft.put("model.dtype", "bfloat16", comment="the trainer loads the weights in bf16, too")
    elif wanted == "float16" and not trains_adapter:
        draft.refuse("full fine-tuning in float16 loses small updates: write `train.precision: fp16`.", "dtype")
    elif wanted is not None:
        draft.put("model.dtype", wanted, "dtype")
        if wanted != "float32" and half is None:
            draft.put("train.precision", {"bfloat16": "bf16", "float16": "fp16"}[wanted], "dtype")
    if draft.value("model.dtype") == "bfloat16" and not trains_adapter:
        draft.note(
            "weights and moments are bf16 without a float32 copy, as in the trainer: small updates are lost. "
            "`model.dtype: float32` with `train.precision: bf16` keeps them, and so does "
            "`train.optimizer.stochastic_rounding: true`."
        )


def _batch(draft: Draft) -> None:
    micro, accumulation = draft.get("micro_batch", 1), draft.get("accumulation", 1)
    world = max(1, draft.gpus // draft.get("sequence_parallel", 1))
    draft.put("train.microbatch_size", micro, "micro_batch")
    if "total_batch" in draft.facts:
        draft.put("train.global_batch_size", draft.get("total_batch"), "total_batch", comment="of all GPUs")
        return
    total = micro * accumulation * world
    product = f"{micro} per GPU x {accumulation} accumulated x {world} GPU{'s' if world > 1 else ''}"
    draft.put("train.global_batch_size", total, "micro_batch", "accumulation", comment=product)
    draft.note(
        "the trainer's batch grows with the number of GPUs, and so does the learning rate that suits it; here "
        f"`train.global_batch_size: {total}` ({product}) is the same on any number. For N GPUs, write `--gpus N`."
    )


def _budget(draft: Draft) -> None:
    steps, epochs, per_epoch = draft.get("max_steps", -1), draft.get("epochs"), draft.get("max_steps_per_epoch", -1)
    if steps > 0:
        draft.put("train.steps", steps, "max_steps")
    elif per_epoch > 0:
        total = per_epoch * int(epochs or 1)
        draft.put("train.steps", total, "max_steps_per_epoch", "epochs", comment=f"{per_epoch} in each epoch")
        draft.note(
            f"each epoch of the trainer stops after {per_epoch} steps and starts over; here {total} steps go "
            "on through the data, so that more of it is seen."
        )
    elif epochs is not None:
        draft.put("train.epochs", epochs, "epochs")


def _schedule(draft: Draft) -> None:
    written = draft.get("schedule")
    warmup = next((name for name in ("warmup_steps", "warmup_ratio") if draft.get(name)), None)
    if written is not None:
        draft.put("train.schedule.name", written.removesuffix("_with_warmup"), "schedule")
    if written == "constant" and warmup is not None:
        draft.drop("the trainer's `constant` has no warmup: `constant_with_warmup` has one", warmup)
        draft.note("the trainer's `constant` ignores the warmup, and none is written here.")
    elif warmup is not None:
        value = draft.get(warmup)
        name = "warmup_fraction" if value < 1 else "warmup_steps"
        draft.put(f"train.schedule.{name}", value if value < 1 else int(value), warmup)
        draft.note("the first step of a warmup has learning rate 0 in the trainer, and peak / warmup steps here.")
    if draft.value("train.schedule.name") == "constant":
        draft.withdraw("train.schedule.final_fraction", KeyOutcome("not_needed", "a constant rate does not decay"))


def _evaluation(draft: Draft) -> None:
    fraction = draft.get("validation_fraction")
    if fraction and not draft.has("data.validation"):
        is_fraction = fraction < 1
        value, comment = (fraction, "") if is_fraction else (0.05, f"{int(fraction)} rows {_ADAPT.partition(':')[0]}")
        draft.put("data.validation.fraction", value, "validation_fraction", comment=comment)
        draft.note("other rows are split off for validation: `run.seed` and the row decide.")
    if not draft.has("data.validation"):
        draft.withdraw("evaluate", KeyOutcome("not_needed", "without validation rows nothing is evaluated"))
        return
    _put_interval(draft, "evaluate.every_steps", "eval", otherwise=100)
    if not draft.has("evaluate"):
        draft.put("evaluate", {}, comment="at the end")
    if "patience" in draft.facts:
        draft.put("train.early_stopping.patience", draft.get("patience"), "patience")
    if draft.get("keep_best"):
        metric = str(draft.get("best_metric", "loss")).removeprefix("eval_")
        draft.put("checkpoint.keep_best.metric", metric, "keep_best", "best_metric")
        if draft.get("is_greater_better"):
            draft.put("checkpoint.keep_best.goal", "maximize", "is_greater_better")
        draft.put("export.checkpoint", "best", "keep_best")


def _put_interval(draft: Draft, key: str, event: str, *, otherwise: int) -> None:
    """Write the steps between two evaluations or saves; `otherwise` where the peer counts in epochs or in shares."""
    steps, strategy = draft.get(f"{event}_steps"), draft.get(f"{event}_strategy", "")
    times = draft.get(f"{event}s_per_epoch") or (1 if strategy == "epoch" else 0)
    if steps and steps >= 1 and strategy not in ("epoch", "no"):
        draft.put(key, int(steps), f"{event}_steps", f"{event}_strategy")
    elif times or (steps and strategy != "no"):
        often = f"{times:g} times per epoch" if times else f"after each {steps:g} of the run"
        fact = f"{event}s_per_epoch" if times else f"{event}_steps"
        draft.put(key, otherwise, fact, f"{event}_strategy", comment=f"{often} {_ADAPT}")


def _strategy(draft: Draft) -> None:
    deepspeed, groups = draft.get("deepspeed"), draft.get("sequence_parallel", 1)
    stage, is_offloaded = (None, False) if is_off(deepspeed) else zero_stage(deepspeed, draft.file.path.parent)
    shards = [name for name in ("fsdp", "fsdp_version", "fsdp_sharding") if not is_off(draft.get(name))]
    facts: tuple[str, ...] = ("deepspeed",)
    if not is_off(deepspeed) and stage is None:
        draft.refuse("which ZeRO stage it is cannot be read: write `finetune init --strategy zero3`.", "deepspeed")
    if stage:
        draft.strategy = f"zero{stage}{'_offload' if is_offloaded and stage > 1 else ''}"
    elif shards or draft.is_sharded or draft.get("fsdp_offload") or draft.get("model_parallel", 1) > 1:
        is_hybrid = any("hybrid" in str(draft.get(name)).lower() for name in ("fsdp", "fsdp_sharding"))
        draft.strategy = "hsdp" if is_hybrid else "fsdp2"
        facts = ("deepspeed", "fsdp", "fsdp_version", "fsdp_sharding", "fsdp_offload", "model_parallel")
        if shards and draft.get("fsdp_version", 1) == 1:
            draft.note("FSDP1 in the file; fsdp2.yaml here, its successor.")
    elif draft.gpus > 1:
        draft.strategy = "ddp"
    if groups > 1 and draft.strategy in ("ddp", "fsdp2"):
        draft.strategy = f"{draft.strategy}_sequence_parallel"
        facts = (*facts, "sequence_parallel")
    elif groups > 1:
        draft.refuse("only ddp and fsdp2 share the tokens of a row.", "sequence_parallel")
    if not is_off(deepspeed) and stage is None:
        facts = facts[1:]
    draft.mapped(f"accelerate file {draft.strategy}.yaml", *facts)


def zero_stage(config: Any, folder: Path) -> tuple[int | None, bool]:
    """Return the ZeRO stage of a DeepSpeed config, a path or a mapping, and whether it offloads; None if unknown."""
    settings = config
    if isinstance(config, str):
        path = next((path for path in (Path(config), folder / config) if is_present(path)), None)
        if path is None:  # `zero2_offload.json`, `ds_z3_config.json`, `zero_stage1.json`
            stage = re.search(r"z(?:ero)?[_-]?(?:stage)?[_-]?([0-3])", Path(config).stem.lower())
            return (None if stage is None else int(stage[1])), "offload" in config.lower()
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None, False
    zero = settings.get("zero_optimization", {"stage": 0}) if isinstance(settings, dict) else None
    if not isinstance(zero, dict) or zero.get("stage", 0) not in (0, 1, 2, 3):
        return None, False
    return zero.get("stage", 0), bool(zero.keys() & {"offload_optimizer", "offload_param"})
