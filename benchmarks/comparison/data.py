"""A workload's folder as every competitor but ours reads it: its settings, its documents as tokens, its model."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from comparison.workloads import Workload

IGNORED = -100


@dataclass(frozen=True)
class Documents:
    """Documents end to end: `ids` and `is_target` of document i from `offsets[i]` to `offsets[i + 1]`."""

    ids: np.ndarray
    is_target: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, path: Path) -> None:
        """Write them."""
        np.savez(path, ids=self.ids, is_target=self.is_target, offsets=self.offsets)

    @classmethod
    def load(cls, path: Path) -> "Documents":
        """Return what was written."""
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["is_target"], arrays["offsets"])

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each document."""
        return np.diff(self.offsets)

    def row(self, index: int) -> dict[str, list[int]]:
        """Return a document as transformers' collators take it; the labels are not shifted yet."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        labels = np.where(self.is_target[part], self.ids[part], IGNORED)
        return {"input_ids": self.ids[part].tolist(), "labels": labels.tolist()}

    def columns(self) -> dict[str, list[Any]]:
        """Return all documents as the columns of a dataset."""
        rows = [self.row(index) for index in range(len(self))]
        return {name: [row[name] for row in rows] for name in ("input_ids", "labels")}

    def describe(self, batch: int) -> str:
        """Return the lengths in words: quantiles, the share of padding in batches of this size, of targets."""
        lengths = self.lengths
        low, median, high = np.percentile(lengths, (25, 50, 75)).astype(int)
        whole = lengths[: len(lengths) // batch * batch].reshape(-1, batch)
        padding = 1 - whole.sum() / (whole.max(axis=1).sum() * batch)
        return (
            f"tokens a document: {lengths.min()} / {low} / {median} / {high} / {lengths.max()} (min, quartiles, max); "
            f"batches of {batch}: {padding:.0%} padding; {self.is_target.mean():.0%} of the tokens are targets"
        )


def padded(rows: list[dict[str, list[int]]], *, pad_id: int) -> dict[str, Tensor]:
    """Return documents as a batch, padded on the right: input_ids, attention_mask, labels  # [batch, length]."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": torch.full((len(rows), longest), pad_id),
        "attention_mask": torch.zeros(len(rows), longest, dtype=torch.long),
        "labels": torch.full((len(rows), longest), IGNORED),
    }
    for number, row in enumerate(rows):
        length = len(row["input_ids"])
        batch["input_ids"][number, :length] = torch.tensor(row["input_ids"])
        batch["attention_mask"][number, :length] = 1
        batch["labels"][number, :length] = torch.tensor(row["labels"])
    return batch


def load_workload(folder: Path) -> Workload:
    """Return the folder's workload."""
    return Workload.of(json.loads((folder / "workload.json").read_text()))


def load_model(folder: Path) -> Any:
    """Return the model in float32."""
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True)
