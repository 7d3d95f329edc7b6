"""A DDP loop written by hand: the same math as the product's, and nothing else."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

from contest.jobs import LEARNING_RATE
from contest.loading import load_model, load_workload
from contest.rows import IGNORED, Rows, padded
from contest.seat import Seat
from contest.workloads import Workload


def play(strategy: str, folder: Path, seat: Seat) -> None:
    """Train the workload."""
    assert strategy == "ddp", strategy
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    workload = load_workload(folder)
    _train(load_model(folder, workload), Rows.load(folder / "tokens.npz"), workload, seat)


def _train(plain: Any, rows: Rows, workload: Workload, seat: Seat) -> None:
    model = DistributedDataParallel(plain, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.0, fused=True)
    share, world = workload.batch // dist.get_world_size(), dist.get_world_size()
    model.train()
    for number in range(workload.steps):
        seat.wait()
        first = number * workload.batch + dist.get_rank() * share
        batch = padded([rows.row(first + i) for i in range(share)], pad_id=plain.config.pad_token_id)
        labels = pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
        num_targets = (labels != IGNORED).sum()
        dist.all_reduce(num_targets)  # a mean over all ranks' targets, however they are shared out
        logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets
        (loss * world).backward()  # DDP takes the mean over the ranks
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seat.note(tokens=int(batch["attention_mask"].sum()), targets=int(num_targets))
        seat.losses.append(loss.detach())
