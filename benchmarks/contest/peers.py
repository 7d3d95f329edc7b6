"""transformers' Trainer and TRL's SFTTrainer, as their documentation sets them up."""

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

from contest.jobs import LEARNING_RATE, packs_a_step
from contest.loading import load_model, load_workload
from contest.rows import IGNORED, Rows
from contest.seat import Seat
from contest.workloads import Workload

ALIKE = {
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "use_cpu": True,
}
"""What has to be said so that everybody does the same thing, or that a CPU has no use for."""

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


def play(name: str, folder: Path, seat: Seat) -> None:
    """Train the workload."""
    workload = load_workload(folder)
    trainer = _trl(name, folder, workload) if name.startswith("trl") else _trainer(name, folder, workload)
    trainer.add_callback(Waiting(seat))
    if "grouped" in name:
        draw_batches(trainer, workload)
    watch_steps(trainer, seat)
    trainer.train()


class Waiting(TrainerCallback):  # type: ignore[misc]
    """Begins each step when the seat may."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the token."""
        self._seat.wait()


def draw_batches(trainer: Any, workload: Workload) -> None:
    """Have the batches of an epoch learnt in an order drawn at random, each as it is.

    Grouped by length, every fifty batches begin with the longest: the few that are measured would be those.
    """
    group = trainer._get_train_sampler

    def sampler(*given: Any) -> list[int]:
        rows = list(group(*given))
        batches = [rows[first : first + workload.batch] for first in range(0, len(rows), workload.batch)]
        random.Random(0).shuffle(batches)
        return [row for batch in batches for row in batch]

    trainer._get_train_sampler = sampler


def watch_steps(trainer: Any, seat: Seat) -> None:
    """Have the seat told what each step learns, and its loss."""
    take = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        mask = inputs.get("attention_mask")
        tokens = inputs["input_ids"].numel() if mask is None else int(mask.sum())
        seat.note(tokens=tokens, targets=int((inputs["labels"] != IGNORED).sum()))
        loss = take(model, inputs, *rest, **named)
        seat.losses.append(loss)
        return loss

    trainer.training_step = training_step


def _trainer(name: str, folder: Path, workload: Workload) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", local_files_only=True)
    settings = TrainingArguments(
        output_dir=str(folder / "runs" / name),
        max_steps=workload.steps,
        per_device_train_batch_size=workload.batch,
        logging_steps=workload.logs_every,
        **ALIKE,
        **SETTINGS[name],
    )
    return Trainer(
        load_model(folder, workload),
        settings,
        train_dataset=_dataset(folder),
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )


def _trl(name: str, folder: Path, workload: Workload) -> Any:
    trl = import_module("trl")
    settings = {"max_length": workload.max_length, **ALIKE, **SETTINGS[name]}
    packs = settings.get("packing", False)
    model = load_model(folder, workload)
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
    return Dataset.from_dict(Rows.load(folder / "tokens.npz").columns())
