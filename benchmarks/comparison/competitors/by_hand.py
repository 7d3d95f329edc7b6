"""Loops written by hand: the same maths and nothing else, on one process and under DDP; and Accelerate's own loop."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from comparison.data import IGNORED, Documents, load_model, load_workload, padded
from comparison.jobs import LEARNING_RATE
from comparison.worker import Worker
from comparison.workloads import Workload


def train(name: str, folder: Path, worker: Worker, *, strategy: str | None) -> None:
    """Train the workload."""
    workload = load_workload(folder)
    model, documents = load_model(folder), Documents.load(folder / "tokens.npz")
    if strategy is not None:
        assert strategy == "ddp", strategy
        _ddp(model, documents, workload, worker)
    else:
        (_accelerate if name == "accelerate" else _bare)(model, documents, workload, worker)


def _bare(model: Any, documents: Documents, workload: Workload, worker: Worker) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    model.train()
    for number in range(workload.steps):
        worker.wait()
        batch, labels = _batch(documents, number * workload.batch, workload.batch, pad_id=model.config.pad_token_id)
        num_targets = int((labels != IGNORED).sum())
        logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        worker.count(tokens=int(batch["attention_mask"].sum()), targets=num_targets)
        worker.losses.append(loss.detach())


def _ddp(plain: Any, documents: Documents, workload: Workload, worker: Worker) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    share, world = workload.batch // dist.get_world_size(), dist.get_world_size()
    model.train()
    for number in range(workload.steps):
        worker.wait()
        first = number * workload.batch + dist.get_rank() * share
        batch, labels = _batch(documents, first, share, pad_id=plain.config.pad_token_id)
        num_targets = (labels != IGNORED).sum()
        worker.count(tokens=int(batch["attention_mask"].sum()), targets=int(num_targets))
        dist.all_reduce(num_targets)  # a mean over the targets of all ranks
        logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets
        (loss * world).backward()  # DDP takes the mean over the ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        worker.losses.append(loss.detach())


def _batch(documents: Documents, first: int, count: int, *, pad_id: int) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the model's inputs and the shifted labels."""
    batch = padded([documents.row(first + i) for i in range(count)], pad_id=pad_id)
    return batch, pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)


def _accelerate(model: Any, documents: Documents, workload: Workload, worker: Worker) -> None:
    """Train as Accelerate's documentation shows it, clipping included."""
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    dataset: Any = [documents.row(index) for index in range(len(documents))]
    collate = partial(padded, pad_id=model.config.pad_token_id)
    loader = DataLoader(dataset, batch_size=workload.batch, collate_fn=collate)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model.train()
    for batch in _in_turn(loader, worker, num_steps=workload.steps):
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        worker.count(tokens=int(batch["attention_mask"].sum()), targets=int((batch["labels"] != IGNORED).sum()))
        worker.losses.append(loss.detach())


def _in_turn(loader: Any, worker: Worker, *, num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a batch a step, each when its step may begin."""
    for batch in islice(loader, num_steps):
        worker.wait()
        yield batch
