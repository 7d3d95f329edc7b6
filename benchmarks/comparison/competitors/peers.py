"""transformers' Trainer and TRL's SFTTrainer, as their documentation sets them up; Trainer also on several ranks."""

import random
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from comparison.competitors.launch import gloo_for, world_size
from comparison.data import IGNORED, Documents, load_model, load_workload
from comparison.jobs import LEARNING_RATE, packs_a_step
from comparison.worker import Worker
from comparison.workloads import Workload

ALIKE = {
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "use_cpu": True,
}
"""What has to be set so that everybody does the same, or that a CPU has no use for."""

EQUAL: dict[str, Any] = {"bf16": False, "gradient_checkpointing": False}
"""TRL's defaults are bf16 and checkpointing."""

SETTINGS: dict[str, dict[str, Any]] = {
    "trainer": {"train_sampling_strategy": "sequential"},
    "trainer grouped": {"train_sampling_strategy": "group_by_length"},
    "trl default": {},
    "trl equal": {**EQUAL, "train_sampling_strategy": "sequential"},
    "trl grouped": {**EQUAL, "train_sampling_strategy": "group_by_length"},
    "trl padding-free": {**EQUAL, "padding_free": True, "max_length": None},
    "trl packing": {**EQUAL, "packing": True, "packing_strategy": "bfd"},
}


def train(name: str, folder: Path, worker: Worker, *, strategy: str | None) -> None:
    """Train the workload."""
    workload = load_workload(folder)
    with gloo_for(strategy):
        make: Callable[..., Any] = _trl if name.startswith("trl") else _trainer
        trainer = make(name, folder, workload, strategy=strategy)
    trainer.add_callback(Waiting(worker))
    if "grouped" in name:
        shuffle_batches(trainer, workload)
    count_steps(trainer, worker)
    trainer.train()
    unset_hf_deepspeed_config()


class Waiting(TrainerCallback):  # type: ignore[misc]
    """Begins each step when the worker may."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait."""
        self._worker.wait()


def shuffle_batches(trainer: Any, workload: Workload) -> None:
    """Have the batches of an epoch come in a random order, each as it is.

    Grouped by length, every fifty batches begin with the longest: the few that are measured would be those.
    """
    group = trainer._get_train_sampler

    def sampler(*given: Any) -> list[int]:
        rows = list(group(*given))
        batches = [rows[first : first + workload.batch] for first in range(0, len(rows), workload.batch)]
        random.Random(0).shuffle(batches)
        return [row for batch in batches for row in batch]

    trainer._get_train_sampler = sampler


def count_steps(trainer: Any, worker: Worker) -> None:
    """Have the worker count what each step trains on, and keep its loss."""
    take = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        worker.count(tokens=tokens, targets=int((inputs["labels"] != IGNORED).sum()))
        loss = take(model, inputs, *rest, **named)
        worker.losses.append(loss / world_size())  # the ranks' shares of the mean are added up
        return loss

    trainer.training_step = training_step


def _trainer(name: str, folder: Path, workload: Workload, *, strategy: str | None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    settings = TrainingArguments(
        output_dir=str(folder / "runs" / f"{name} {strategy}"),
        max_steps=workload.steps,
        per_device_train_batch_size=workload.batch // world_size(),
        logging_steps=workload.logs_every,
        **{**ALIKE, "use_cpu": strategy in (None, "ddp")},
        **SETTINGS[name],
    )
    return Trainer(
        load_model(folder),
        settings,
        train_dataset=_dataset(folder),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )


def _trl(name: str, folder: Path, workload: Workload, *, strategy: str | None) -> Any:
    assert strategy is None, strategy
    trl = import_module("trl")
    settings = {"max_length": workload.max_length, **ALIKE, **SETTINGS[name]}
    packs = settings.get("packing", False)
    model = load_model(folder)
    return trl.SFTTrainer(
        model.to(torch.bfloat16) if settings.get("bf16") else model,
        trl.SFTConfig(
            output_dir=str(folder / "runs" / name),
            max_steps=workload.steps,
            per_device_train_batch_size=packs_a_step(folder, workload) if packs else workload.batch,
            logging_steps=workload.logs_every,
            **settings,
        ),
        train_dataset=_dataset(folder),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", local_files_only=True),
    )


def _dataset(folder: Path) -> Dataset:
    return Dataset.from_dict(Documents.load(folder / "tokens.npz").columns())
