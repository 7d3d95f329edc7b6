"""The bare loop on a GPU: written by hand, with everything a loop of one page can have."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gpu_comparison.cases import Case
from gpu_comparison.shapes import Shape
from gpu_comparison.step_timer import StepTimer
from gpu_comparison.weights import build

PAD, IGNORED = 1, -100
LEARNING_RATE = 1e-5


def train(case: Case, shape: Shape, rows: list[list[int]], timer: StepTimer, *, folder: Path) -> None:
    """Train the case's steps; nothing is written."""
    del folder
    model = build(shape, dtype=case.dtype, device=timer.device, lora=case.lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, LEARNING_RATE, weight_decay=0.0, fused=True)
    batches = list(_batches(case, rows, timer.device))
    for inputs, labels, num_tokens in batches:
        timer.step()
        timer.count(num_tokens)
        with torch.autocast(timer.device.type, dtype=torch.bfloat16):
            logits = model(**inputs, use_cache=False).logits
        flat, wanted = logits.flatten(0, 1).float(), labels.flatten()
        loss = cross_entropy(flat, wanted, reduction="sum", ignore_index=IGNORED) / num_tokens
        del logits, flat
        timer.mark("forward")
        loss.backward()
        timer.mark("backward")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        timer.mark("update")


def _batches(case: Case, rows: list[list[int]], device: torch.device) -> Iterator[tuple[dict[str, Any], Tensor, int]]:
    """Yield inputs, shifted labels and the number of tokens that are no padding; all are on the device before."""
    for first in range(0, len(rows), case.rows):
        picked = rows[first : first + case.rows]
        longest = max(map(len, picked))
        ids = torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in picked])
        labels = torch.tensor([[*row[1:], *[IGNORED] * (longest - len(row) + 1)] for row in picked])
        inputs = {"input_ids": ids.to(device)}
        if case.varies:
            inputs["attention_mask"] = (torch.arange(longest) < torch.tensor([[len(row)] for row in picked])).to(device)
        yield inputs, labels.to(device), sum(map(len, picked))
