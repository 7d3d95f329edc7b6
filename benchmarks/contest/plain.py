"""The floors: a loop written by hand that does the same math and nothing else, and Accelerate's own minimal loop."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import DataLoader

from contest.jobs import LEARNING_RATE
from contest.loading import load_model, load_workload
from contest.rows import IGNORED, Rows, padded
from contest.seat import Seat
from contest.workloads import Workload


def play(name: str, folder: Path, seat: Seat) -> None:
    """Train the workload."""
    workload = load_workload(folder)
    model = load_model(folder, workload)
    rows = Rows.load(folder / "tokens.npz")
    {"bare": _bare, "accelerate": _accelerate}[name](model, rows, workload, seat)


def _bare(model: Any, rows: Rows, workload: Workload, seat: Seat) -> None:
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, LEARNING_RATE, weight_decay=0.0, fused=True)
    model.train()
    for number in range(workload.steps):
        seat.wait()
        first = number * workload.batch
        batch = padded([rows.row(first + i) for i in range(workload.batch)], pad_id=model.config.pad_token_id)
        labels = pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
        num_targets = int((labels != IGNORED).sum())
        logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seat.note(tokens=int(batch["attention_mask"].sum()), targets=num_targets)
        seat.losses.append(loss.detach())


def _accelerate(model: Any, rows: Rows, workload: Workload, seat: Seat) -> None:
    """Train as Accelerate's documentation shows it, clipping included."""
    accelerator = Accelerator(cpu=True)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, LEARNING_RATE, weight_decay=0.0, fused=True)
    dataset: Any = [rows.row(index) for index in range(len(rows))]
    collate = partial(padded, pad_id=model.config.pad_token_id)
    loader = DataLoader(dataset, batch_size=workload.batch, collate_fn=collate)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for batch in _announced(loader, seat, num_steps=workload.steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        seat.note(tokens=int(batch["attention_mask"].sum()), targets=int((batch["labels"] != IGNORED).sum()))
        seat.losses.append(loss.detach())


def _announced(loader: Any, seat: Seat, *, num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a batch a step, each when its step may begin."""
    for batch in islice(loader, num_steps):
        seat.wait()
        yield batch
