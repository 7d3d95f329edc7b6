"""Checks on the model in hand that packed samples do not see each other; otherwise the run is refused."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from finetune.errors import ModelError

PackedRow = Sequence[Sequence[int]]
"""The token ids of samples that are packed into one row."""

_LENGTHS = (5, 7, 4)
_TOLERANCE = {"full": (1e-5, 1e-4), "half": (1e-2, 0.1)}
"""Tolerance if another sample changes, and of a sample in a row against the same sample alone; by precision."""


@torch.no_grad()
def check_isolation(
    logits_of: Callable[[PackedRow], Tensor], *, config: Any, vocabulary_size: int, is_half: bool
) -> None:
    """Raise ModelError unless each sample of a packed row has the same logits as alone.

    `logits_of` returns [tokens of the row, vocabulary] in evaluation mode. Two tiny forward passes: a sample is first
    and third in a row, then all others in the row change. Collective if `logits_of` is.
    """
    behind, sample, last = (_tokens(length, vocabulary_size, salt) for salt, length in enumerate(_LENGTHS))
    other_behind, other_last = (_tokens(length, vocabulary_size, salt=7) for length in (_LENGTHS[0], _LENGTHS[2]))
    rows = [[sample, behind, sample, last], [sample, other_behind, sample, other_last]]
    row, changed = (_split_by_sample(logits_of(each), each) for each in rows)
    seen, misplaced = _TOLERANCE["half" if is_half else "full"]
    if any(_difference(row[place], changed[place]) > seen for place in (0, 2)):
        attention = getattr(config, "_attn_implementation", None)
        raise _isolation_error(config, f"a sample depends on others in its row (model.attention is `{attention}`)")
    if _difference(row[0], row[2]) > misplaced:
        raise _isolation_error(
            config, "a sample after another differs from the sample alone: its positions are not reset"
        )


def require_position_ids(arguments: frozenset[str], *, config: Any) -> None:
    """Raise ModelError for a model without `position_ids`; `arguments` are those of its forward."""
    if "position_ids" not in arguments:
        raise _isolation_error(config, "it has no `position_ids` argument, which separates the samples")


def _tokens(length: int, vocabulary_size: int, salt: int) -> list[int]:
    return [(17 + 31 * salt + 13 * place * (salt + 1)) % vocabulary_size for place in range(length)]


def _split_by_sample(logits: Tensor, samples: PackedRow) -> tuple[Tensor, ...]:
    edges = accumulate((len(each) for each in samples), initial=0)
    return tuple(logits[start:stop] for start, stop in pairwise(edges))


def _difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference relative to the largest logit; infinite if a number is not finite."""
    difference = (one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=1e-6)
    return float(torch.nan_to_num(difference, nan=torch.inf))


def _isolation_error(config: Any, reason: str) -> ModelError:
    kinds = sorted({str(kind) for kind in getattr(config, "layer_types", None) or ()})
    layers = f" (layers: {', '.join(kinds)})" if kinds else ""
    return ModelError(
        f"data.batching: `{config.model_type}`{layers} does not support packed samples: {reason}. "
        "Pad them instead: write `by: tokens`, or `by: samples` with `length_window_steps: 1`, "
        "and no `padding_free`."
    )
