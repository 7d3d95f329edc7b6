"""transformers' Trainer and TRL's SFTTrainer on a GPU, in bf16 as their documentation sets it up."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from finetune.model.attention import implementation
from finetune.runtime.parallel import SAMPLE_LENGTHS, SampleLengths

from comparison.data import padded
from gpu_comparison.cases import LOG_EVERY, STEPS, Case
from gpu_comparison.documents import PAD, write_tokenizer
from gpu_comparison.shapes import Shape
from gpu_comparison.step_timer import StepTimer
from gpu_comparison.weights import LEARNING_RATE, build


def train(case: Case, shape: Shape, rows: list[list[int]], timer: StepTimer, *, folder: Path) -> None:
    """Train the case's steps."""
    model = build(shape, case.workload, timer.device)
    make = _trl if case.variant.competitor == "trl" else _trainer
    trainer = make(case, model, rows, folder=folder, settings=_settings(case, timer.device))
    trainer.add_callback(Steps(timer))
    _count(trainer, timer)
    trainer.train()


class Steps(TrainerCallback):  # type: ignore[misc]
    """Notes where steps begin."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note it."""
        self._timer.step()


class Documents(Dataset[dict[str, Any]]):
    """Documents as their collators take them."""

    def __init__(self, rows: list[list[int]]) -> None:
        self._rows = rows
        self.column_names = ["input_ids", "labels"]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def _settings(case: Case, device: torch.device) -> dict[str, Any]:
    return {
        "bf16": True,
        "optim": "adamw_torch_fused",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "per_device_train_batch_size": case.workload.rows,
        "logging_steps": LOG_EVERY,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": device.type == "cpu",
        **case.variant.settings,
    }


def _trainer(case: Case, model: Any, rows: list[list[int]], *, folder: Path, settings: dict[str, Any]) -> Any:
    del case
    arguments = TrainingArguments(output_dir=str(folder / "trainer"), **settings)
    return Trainer(model, arguments, train_dataset=Documents(rows), data_collator=partial(padded, pad_id=PAD))


def _trl(case: Case, model: Any, rows: list[list[int]], *, folder: Path, settings: dict[str, Any]) -> Any:
    trl, datasets, transformers = (import_module(name) for name in ("trl", "datasets", "transformers"))
    tokenizer = write_tokenizer(folder, vocabulary=model.config.vocab_size)
    if settings.get("packing"):
        settings["per_device_train_batch_size"] = 1
        model.set_attn_implementation(packing_attention())
    configuration = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_length=case.workload.length, gradient_checkpointing=False, **settings
    )
    return trl.SFTTrainer(
        model,
        configuration,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        processing_class=transformers.AutoTokenizer.from_pretrained(tokenizer, local_files_only=True),
    )


PACKED = "benchmark_packed"


def packing_attention() -> str:
    """Return the attention that keeps TRL's packs apart: our kernel, so that kernels are not what is compared.

    TRL gives the edges of the documents as flash attention takes them.
    """
    implementation.register_per_sample()
    AttentionInterface.register(PACKED, _attend)
    AttentionMaskInterface.register(PACKED, _no_mask)
    return PACKED


def _attend(module: Any, *qkv: Any, cu_seq_lens_q: Tensor, max_length_q: Any, **others: Any) -> Any:
    sizes = [] if cu_seq_lens_q.is_cuda else cu_seq_lens_q.diff().tolist()  # without a kernel: document by document
    given = {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": int(max_length_q), SAMPLE_LENGTHS: SampleLengths(sizes)}
    return implementation.per_sample_attention(module, *qkv, **{**others, **given})


def _no_mask(**_: Any) -> None:
    return None


def _count(trainer: Any, timer: StepTimer) -> None:
    """Have the timer count what each step trains on."""
    take = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        mask = inputs.get("attention_mask")
        timer.count(inputs["input_ids"].numel() if mask is None else int(mask.sum()))
        return take(model, inputs, *rest, **named)

    trainer.training_step = training_step
