"""Duplicate texts in a step: a relevant passage must not count as a negative because it occurs twice."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskedPairs:
    """Pairs of a row and a candidate that are excluded from the loss."""

    rows: np.ndarray  # int64 [pairs], ascending
    candidates: np.ndarray  # int64 [pairs]

    def __len__(self) -> int:
        return len(self.rows)

    def places(self, rows: range, *, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the pairs of these rows as indices into their logits; None if there are none."""
        first, last = np.searchsorted(self.rows, [rows.start, rows.stop])
        if first == last:
            return None
        both = torch.from_numpy(np.stack([self.rows[first:last] - rows.start, self.candidates[first:last]]))
        if device.type == "cuda":
            both = both.pin_memory()
        row, candidate = both.to(device, non_blocking=True)
        return row, candidate


def masked_passages(anchor_ids: np.ndarray, passage_ids: np.ndarray, rows: range) -> MaskedPairs:
    """Return the passages relevant to the anchor of each of these rows, except the row's own.

    Row i has anchor i and passage i; both arrays hold digests of texts. With negatives there are more passages than
    anchors. A text is relevant to an anchor if it is the positive of an equal anchor.
    """
    positives = passage_ids[: len(anchor_ids)]
    relevant = _partners(anchor_ids, positives)
    return _pairs(
        anchor_ids, passage_ids, rows, relevant=relevant, may_have=_occurs_twice(anchor_ids, positives, passage_ids)
    )


def masked_anchors(anchor_ids: np.ndarray, passage_ids: np.ndarray, rows: range) -> MaskedPairs:
    """Return the anchors to which the positive of each of these rows is relevant, except the row's own."""
    positives = passage_ids[: len(anchor_ids)]
    relevant = _partners(positives, anchor_ids)
    may_have = _occurs_twice(anchor_ids, positives, positives)
    return _pairs(positives, anchor_ids, rows, relevant=relevant, may_have=may_have)


def _partners(ids: np.ndarray, others: np.ndarray) -> Mapping[int, set[int]]:
    partners: dict[int, set[int]] = defaultdict(set)
    for one, other in zip(ids.tolist(), others.tolist(), strict=True):
        partners[one].add(other)
    return partners


def _occurs_twice(anchor_ids: np.ndarray, positives: np.ndarray, passage_ids: np.ndarray) -> np.ndarray:
    """Return whether the anchor or the positive of each row occurs again; only these rows can have pairs."""
    occurs: np.ndarray = _counts(anchor_ids, anchor_ids) + _counts(positives, passage_ids) > 2
    return occurs


def _counts(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    known, numbers = np.unique(among, return_counts=True)
    counts: np.ndarray = numbers[np.searchsorted(known, ids)]
    return counts


def _pairs(
    ids: np.ndarray, candidates: np.ndarray, rows: range, *, relevant: Mapping[int, set[int]], may_have: np.ndarray
) -> MaskedPairs:
    chosen = [row for row in rows if may_have[row]]
    row_candidates: list[tuple[int, int]] = []
    if chosen:
        indices: dict[int, list[int]] = defaultdict(list)
        for index, text in enumerate(candidates.tolist()):
            indices[text].append(index)
        for row in chosen:
            same = (index for text in relevant[int(ids[row])] for index in indices[text] if index != row)
            row_candidates.extend((row, index) for index in sorted(same))
    pairs = np.array(row_candidates, np.int64).reshape(-1, 2)
    return MaskedPairs(pairs[:, 0], pairs[:, 1])
