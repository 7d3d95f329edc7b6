"""The bare loop on a GPU: written by hand, with everything a loop of one page can have."""

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, pad

from comparison.data import IGNORED, padded
from gpu_comparison.cases import Case
from gpu_comparison.documents import PAD
from gpu_comparison.shapes import Shape
from gpu_comparison.step_timer import StepTimer
from gpu_comparison.weights import LEARNING_RATE, build


def train(case: Case, shape: Shape, rows: list[list[int]], timer: StepTimer, *, folder: Path) -> None:
    """Train the case's steps; nothing is written."""
    del folder
    model, size = build(shape, case.workload, timer.device), case.workload.rows
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.0, fused=True)
    groups = [[{"input_ids": row, "labels": row} for row in rows[at : at + size]] for at in range(0, len(rows), size)]
    batches = [
        {name: tensor.to(timer.device) for name, tensor in padded(group, pad_id=PAD).items()} for group in groups
    ]
    for batch, group in zip(batches, groups, strict=True):
        timer.step()
        num_tokens = sum(len(row["input_ids"]) for row in group)
        timer.count(num_tokens)
        inputs = {"input_ids": batch["input_ids"]}
        if case.workload.varies:
            inputs["attention_mask"] = batch["attention_mask"]
        with torch.autocast(timer.device.type, dtype=torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits
        flat, targets = logits.flatten(0, 1).float(), pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
        loss = cross_entropy(flat, targets, reduction="sum", ignore_index=IGNORED) / num_tokens
        del logits, flat
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        timer.mark("update")
