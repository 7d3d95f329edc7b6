"""The check that a model does not read its padding, and which models draw random numbers besides dropout."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from finetune.errors import ModelError

_TEXT = "The quick brown fox jumps over the lazy dog, and 1,024 others watch it in the rain. "
_WORDS, _LONGEST = 12, 300  # of the shorter sample, and tokens of the longer one
_TOLERANCE = {"full": 1e-4, "half": 0.1}
_JITTER = ("router_jitter_noise", "input_jitter_noise")
_RANDOM = {"yoso": "its attention hashes at random"}


@torch.no_grad()
def check_padding(
    outputs_of: Callable[[Sequence[Sequence[int]]], Tensor],
    *,
    config: Any,
    tokenizer: Any,
    longest: int,
    is_half: bool,
    advice: str,
) -> None:
    """Raise ModelError, with the advice, where a sample has other outputs in a padded batch than alone.

    `outputs_of` returns what the model makes of samples, padded on the right, in evaluation mode: [samples, outputs] or
    [samples, tokens, outputs]. `longest` is the most tokens that it reads. Collective if `outputs_of` is.
    """
    short, long = _sample_ids(tokenizer, longest)
    alone = outputs_of([short])[0]
    padded = outputs_of([short, long])[0]
    if alone.dim() == 2:
        length = min(len(short), len(alone))
        alone, padded = alone[:length], padded[:length]
    difference = (alone.float() - padded.float()).abs().max() / alone.float().abs().max().clamp(min=1e-6)
    if float(difference) > _TOLERANCE["half" if is_half else "full"] and config.model_type not in _RANDOM:
        raise ModelError(
            f"`{config.model_type}` reads its padding: what it computes for a sample depends on the longer ones in its "
            f"batch (here by {float(difference):.2g} of the largest output). {advice}"
        )


def randomness(config: Any) -> str | None:
    """Return how the layers of this model draw random numbers besides dropout; None where they draw none."""
    jitter = (f"`{name}: {getattr(config, name)}` in its config" for name in _JITTER if getattr(config, name, None))
    reason = _RANDOM.get(config.model_type) or next(jitter, None)
    return reason and (
        f"`{config.model_type}` draws random numbers besides dropout ({reason}): its losses depend, by chance, on the "
        "microbatch size and the number of processes"
    )


def _sample_ids(tokenizer: Any, longest: int) -> tuple[list[int], list[int]]:
    """Return the ids of a short text and of a long one, special tokens included."""
    limit = min(longest, _LONGEST)
    texts = (" ".join(_TEXT.split()[:_WORDS]), _TEXT * _LONGEST)
    short, long = (tokenizer(text)["input_ids"] for text in texts)
    long = [*long[: limit - 1], long[-1]]
    length = min(len(short), len(long) // 2)
    return [*short[: length - 1 - (length % 2 == 0)], short[-1]], long  # of odd length: pooled pairs have a neighbor
