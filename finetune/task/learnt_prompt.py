"""Answers of a model with something learnt before the text: it is put there anew in every forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn


def has_learnt_prompt(model: nn.Module) -> bool:
    """Tell whether peft puts learnt tokens, or keys and values, before the text (prompt and prefix tuning)."""
    inner: Any = model
    while inner is not None and not hasattr(inner, "peft_config"):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
    return inner is not None and any(each.is_prompt_learning for each in inner.peft_config.values())


@dataclass(frozen=True)
class Rewriting:
    """The state of such a model: all of the text, padded on the right as in training, and no cache."""

    rows: tuple[tuple[int, ...], ...]
    pad_id: int
    device: torch.device

    def advance(self, model: nn.Module) -> "tuple[Tensor, Rewriting]":
        """Return the likeliest next token of each row ([batch]); reads everything again."""
        lengths = torch.tensor([len(row) for row in self.rows], device=self.device)  # [batch]
        longest = int(lengths.max())
        padded = [[*row, *[self.pad_id] * (longest - len(row))] for row in self.rows]
        input_ids = torch.tensor(padded, device=self.device)
        mask = (torch.arange(longest, device=self.device) < lengths[:, None]).long()
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, -longest:]
        return logits[torch.arange(len(self.rows), device=self.device), lengths - 1].argmax(dim=-1), self

    def followed_by(self, chosen: Tensor) -> "Rewriting":
        """Return the state one token later; chosen is [batch]."""
        rows = tuple((*row, token) for row, token in zip(self.rows, chosen.tolist(), strict=True))
        return replace(self, rows=rows)


def rewriting(prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> Rewriting:
    """Return the state before the first token."""
    return Rewriting(tuple(tuple(prompt) for prompt in prompts), pad_id, device)
