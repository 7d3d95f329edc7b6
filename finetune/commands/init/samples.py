"""`finetune init --from FILE --prove` for a config of TRL: its samples and the job's, token by token.

TRL's own trainer prepares the first rows, with the tokenizer that it chooses, around a small random model of the same
architecture. Nothing is trained, and packing is off on both sides.
"""

import math
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import HfArgumentParser, get_scheduler

from finetune.commands.prepare import without_audit_limits
from finetune.commands.rehearse.job_changes import required_sizes
from finetune.commands.rehearse.small_model import build_small, shrink_architecture
from finetune.config.run_config import RunConfig
from finetune.config.sections.data import BatchingSection
from finetune.data.encoding.preference import IS_GOOD
from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.errors import FinetuneError, UserError
from finetune.migration.draft import Draft
from finetune.registry.tasks import TASKS
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import make_training_data
from finetune.runtime.optional import require
from finetune.train.plan import build_schedule

NUM_ROWS = 64
_MAX_LISTED = 3

_TRAINERS = {"sft": "SFT", "pretrain": "SFT", "preference": "DPO", "reward": "Reward"}
"""Prefixes of TRL's trainers and their arguments, by our task; a preference loss of KTO has one of its own."""

_WITHOUT_TRAINING = {
    **{"use_cpu": True, "bf16": False, "fp16": False, "tf32": None, "deepspeed": None, "fsdp": None},
    **{"report_to": "none", "push_to_hub": False, "packing": False, "padding_free": False, "eval_strategy": "no"},
    **{"load_best_model_at_end": False, "torch_compile": False, "use_liger_kernel": False},
    **{"precompute_ref_log_probs": False, "dataset_num_proc": None, "trust_remote_code": False},
}
"""Arguments that a trainer which only prepares rows on a CPU must not take from the file."""


@dataclass(frozen=True)
class TokenSequence:
    """The token ids of a sequence, and which of them count in the loss."""

    ids: tuple[int, ...]
    is_target: tuple[bool, ...] | None  # None for a reward, which has one score for all of them


Samples = dict[int, list[TokenSequence]]
"""The sequences of a row by its number, from 1: one, or the chosen and the rejected answer."""


def format_samples(draft: Draft, config: RunConfig) -> Iterator[str]:
    """Yield how many of the first rows are the same samples in TRL and here, and the first that differ.

    Raises UserError where TRL has no trainer for the task, or cannot prepare the rows; MissingPackage without TRL.
    """
    trl = require("trl", extra="benchmark", purpose="--prove")
    if not {"dataset_name", "datasets"} & draft.file.values.keys():
        raise UserError("--prove: the file names no dataset, so there are no rows to compare. Leave --prove out.")
    if config.data.train.mix:
        raise UserError("--prove: several sources are mixed in an order of their own. Compare them one by one.")
    with tempfile.TemporaryDirectory(prefix="finetune-prove-") as folder:
        limit = min(NUM_ROWS, config.data.train.take or NUM_ROWS)
        source = config.data.train.model_copy(update={"take": limit, "stream": None})
        changes = {
            **{"train": source, "validation": None, "shuffle": False, "batching": BatchingSection()},
            "cache_folder": Path(folder) / "cache",
        }
        own_config = config.model_copy(update={"data": config.data.model_copy(update=changes)})
        data = make_training_data(without_audit_limits(own_config), RunLog(is_main=False))
        here, view = {}, data.training.samples
        for sample_id in data.training.order.samples(0, data.training.order.num_positions or 0).tolist():
            number = re.search(r"row (\d+)$", view.location(sample_id))
            assert number is not None
            features = view[sample_id]
            sequences = list(_sequences(features))
            if IS_GOOD in features.arrays:
                del sequences[1:]  # an answer to another prompt, which estimates the KL divergence
            here[int(number[1])] = sequences
        there = _their_samples(trl, draft, config, Path(folder))
    differences = {
        row: text
        for row in range(1, max(there | here, default=0) + 1)
        if (text := _difference(there.get(row), here.get(row), data.tokenizer))
    }
    num_rows = len(there | here)
    yield f"samples of the first {num_rows} rows, TRL {trl.__version__} and here"
    yield f"the same token ids and targets: {num_rows - len(differences)} of {num_rows} rows"
    yield from (f"  row {row}: {differences[row]}" for row in list(differences)[:_MAX_LISTED])
    if len(differences) > _MAX_LISTED:
        yield f"  and {len(differences) - _MAX_LISTED} more rows"


def _sequences(features: Features) -> Iterator[TokenSequence]:
    ids, is_target = features.arrays["input_ids"], features.arrays.get("is_target")
    ends = np.cumsum(features.arrays.get(LENGTHS_OF_SEQUENCES, [len(ids)]))
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        flags = None if is_target is None else tuple(is_target[start:end].tolist())
        yield TokenSequence(tuple(ids[start:end].tolist()), flags)


def _their_samples(trl: Any, draft: Draft, config: RunConfig, folder: Path) -> Samples:
    name = "KTO" if config.task.name == "preference" and config.task.preference.loss == "kto" else None
    name = name or _TRAINERS.get(config.task.name)
    if name is None:
        raise UserError(f"--prove: TRL's trainer for `{config.task.name}` is not compared. Leave --prove out.")
    kinds = (trl.ScriptArguments, getattr(trl, f"{name}Config"), trl.DatasetMixtureConfig)
    known = {field for kind in kinds for field in kind.__dataclass_fields__}
    written = {**draft.file.values, **_WITHOUT_TRAINING, "output_dir": str(folder / "trl"), "model_init_kwargs": None}
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script, arguments, mixture = HfArgumentParser(kinds).parse_dict(
                {key: value for key, value in written.items() if key in known}
            )
            if mixture.datasets:
                rows = trl.get_dataset(mixture)
            else:
                datasets = require("datasets", extra="", purpose="--prove")
                rows = datasets.load_dataset(script.dataset_name, name=script.dataset_config)
            rows = rows[script.dataset_train_split]
            rows = rows.select(range(min(NUM_ROWS, len(rows))))
            head = TASKS[config.task.name].head
            architecture = shrink_architecture(config.model, head=head, sizes=required_sizes(config))
            model = build_small(architecture.config, config.model, head=head)
            model.config._name_or_path = config.model.name  # where TRL loads the tokenizer
            if config.task.name == "reward":
                model.config.num_labels = 1
            trainer = getattr(trl, f"{name}Trainer")(
                model=model, args=arguments, train_dataset=rows, processing_class=None
            )
            examples = [trainer.data_collator([example]) for example in trainer.train_dataset]
    except FinetuneError:
        raise
    except Exception as error:  # any exception that TRL or datasets raises for an unusable file
        lines = str(error).splitlines() or [""]
        raise UserError(f"--prove: TRL cannot prepare the rows: {type(error).__name__}: {lines[0][:300]}") from error
    return {row: list(_collated(example)) for row, example in enumerate(examples, start=1)}


def _collated(example: Mapping[str, Any]) -> Iterator[TokenSequence]:
    """Yield the sequences of a batch of one row without its padding."""
    targets = example["labels"] != -100 if "labels" in example else example.get("completion_mask")
    for number, ids in enumerate(example["input_ids"]):
        kept = example["attention_mask"][number].bool() if "attention_mask" in example else ids == ids
        flags = None if targets is None else tuple(targets[number][kept].bool().tolist())
        yield TokenSequence(tuple(ids[kept].tolist()), flags)


def _difference(there: Sequence[TokenSequence] | None, here: Sequence[TokenSequence] | None, tokenizer: Any) -> str:
    """Return what differs first between the samples of a row; an empty string where nothing does."""
    if there is None or here is None:
        return "it is a sample here, and was left out there" if there is None else "it was left out here"
    if len(there) != len(here):
        return f"{len(there)} sequences there, {len(here)} here"
    for their, our in zip(there, here, strict=True):
        if their.ids != our.ids:
            pairs = zip(their.ids, our.ids, strict=False)
            start = next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(their.ids), len(our.ids)))
            texts = [tokenizer.decode(sequence.ids[start : start + 8]) for sequence in (their, our)]
            lengths = f"{len(their.ids):,} tokens there, {len(our.ids):,} here"
            return f"{lengths}; from token {start + 1} on {texts[0]!r} there, {texts[1]!r} here"
        if their.is_target is not None and our.is_target is not None:
            for position in range(1, len(our.ids)):  # nothing predicts the first token
                if their.is_target[position] != our.is_target[position]:
                    where = "there" if their.is_target[position] else "here"
                    text = tokenizer.decode(our.ids[position : position + 1])
                    counts = f"{sum(their.is_target[1:]):,} targets there, {sum(our.is_target[1:]):,} here"
                    return f"{counts}; token {position + 1}, {text!r}, is a target {where} alone"
    return ""


_ASSUMED_STEPS = 100
_FIRST_STEPS = 5
_THROUGH_TRAINER = ("axolotl", "TRL", "LLaMA-Factory", "transformers' Trainer")
"""Trainers with transformers' own schedules."""


def format_rates(draft: Draft, config: RunConfig, *, title: str) -> Iterator[str]:
    """Yield a table of the learning rates of some steps, there and here; raises UserError if it cannot be made."""
    if title not in _THROUGH_TRAINER:
        raise UserError(f"--prove: {title} is not installed here, so nothing can be compared with it. Leave it out.")
    num_steps = config.train.steps or _ASSUMED_STEPS
    # there: the rates of transformers' schedule of the file's name
    name = draft.get("schedule", config.train.schedule.name)
    warmup = draft.get("warmup_steps") or draft.get("warmup_ratio") or 0
    num_warmup = math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.train.learning_rate)
    options = {"num_decay_steps": num_steps // 5} if name == "warmup_stable_decay" else None
    try:
        scheduler = get_scheduler(
            name,
            optimizer,
            num_warmup_steps=num_warmup,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=options,
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"--prove: transformers cannot build the schedule `{name}` from its name alone.") from error
    theirs = []
    for _ in range(num_steps):
        theirs.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    schedule = build_schedule(config.train.schedule, peak=config.train.learning_rate, num_steps=num_steps)
    ours = [schedule.learning_rate(step) for step in range(num_steps)]
    assumed = "" if config.train.steps else ", assumed: the job counts epochs or tokens"
    yield f"learning rates of {num_steps} steps{assumed}"
    yield f"{'step':>8} {'there':>12} {'here':>12}"
    later = range(_FIRST_STEPS, num_steps, max(1, num_steps // _FIRST_STEPS))
    for step in dict.fromkeys((*range(min(_FIRST_STEPS, num_steps)), *later, num_steps - 1)):
        yield f"{step + 1:>8} {theirs[step]:>12.4g} {ours[step]:>12.4g}"
    largest = max(abs(one - other) for one, other in zip(theirs, ours, strict=True)) / config.train.learning_rate
    yield f"largest difference: {largest:.2%} of the peak"
