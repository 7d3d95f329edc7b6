"""Equal texts in a step: a passage that is right for an anchor must not count as wrong because it occurs twice."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskedPairs:
    """Pairs of a row and a candidate that are left out of the loss."""

    rows: np.ndarray  # int64 [pairs], ascending
    candidates: np.ndarray  # int64 [pairs]

    def __len__(self) -> int:
        return len(self.rows)

    def places(self, rows: range, *, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the pairs of these rows as indices into their logits; None where there are none."""
        first, last = np.searchsorted(self.rows, [rows.start, rows.stop])
        if first == last:
            return None
        both = torch.from_numpy(np.stack([self.rows[first:last] - rows.start, self.candidates[first:last]]))
        if device.type == "cuda":
            both = both.pin_memory()
        row, candidate = both.to(device, non_blocking=True)
        return row, candidate


def masked_passages(anchor_ids: np.ndarray, passage_ids: np.ndarray, rows: range) -> MaskedPairs:
    """Return which passages are right for the anchor of each of these rows, next to the row's own.

    Row i has anchor i and passage i; both arrays hold digests of texts, of more passages than anchors where there are
    negatives. Right for an anchor are the texts that are the positive of an equal anchor.
    """
    positives = passage_ids[: len(anchor_ids)]
    right = _partners(anchor_ids, positives)
    return _pairs(
        anchor_ids, passage_ids, rows, right=right, may_have=_occurs_twice(anchor_ids, positives, passage_ids)
    )


def masked_anchors(anchor_ids: np.ndarray, passage_ids: np.ndarray, rows: range) -> MaskedPairs:
    """Return the anchors for which the positive of each of these rows is right, next to the row's own."""
    positives = passage_ids[: len(anchor_ids)]
    right = _partners(positives, anchor_ids)
    return _pairs(positives, anchor_ids, rows, right=right, may_have=_occurs_twice(anchor_ids, positives, positives))


def _partners(ids: np.ndarray, others: np.ndarray) -> Mapping[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for one, other in zip(ids.tolist(), others.tolist(), strict=True):
        found[one].add(other)
    return found


def _occurs_twice(anchor_ids: np.ndarray, positives: np.ndarray, passage_ids: np.ndarray) -> np.ndarray:
    """Return of each row whether its anchor or its positive occurs again: no other row has a pair."""
    occurs: np.ndarray = _counts(anchor_ids, anchor_ids) + _counts(positives, passage_ids) > 2
    return occurs


def _counts(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    known, numbers = np.unique(among, return_counts=True)
    counts: np.ndarray = numbers[np.searchsorted(known, ids)]
    return counts


def _pairs(
    ids: np.ndarray, candidates: np.ndarray, rows: range, *, right: Mapping[int, set[int]], may_have: np.ndarray
) -> MaskedPairs:
    chosen = [row for row in rows if may_have[row]]
    found: list[tuple[int, int]] = []
    if chosen:
        places: dict[int, list[int]] = defaultdict(list)
        for place, each in enumerate(candidates.tolist()):
            places[each].append(place)
        for row in chosen:
            same = (place for text in right[int(ids[row])] for place in places[text] if place != row)
            found.extend((row, place) for place in sorted(same))
    pairs = np.array(found, np.int64).reshape(-1, 2)
    return MaskedPairs(pairs[:, 0], pairs[:, 1])
