"""Answers to a prompt with images, one prompt at a time: the model reads the images once, with the first pass."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from finetune.task.forward import innermost
from finetune.task.protocol import Prompt

_OWN_POSITIONS = "mm_token_type_ids"
"""Models that are told which tokens are of an image (Qwen-VL) place these in two dimensions, and work it out."""


@dataclass(frozen=True)
class Seeing:
    """The state of a decoder that has read a prompt, and a row beside it where the prompt shows no image."""

    input_ids: Tensor  # [1 or 2, length]
    attention_mask: Tensor  # [1 or 2, length]
    seen: Mapping[str, Tensor]  # the images, as the model is given them
    per_token: Mapping[str, Tensor]  # [1 or 2, length of the prompt]
    arguments: frozenset[str]  # names of what the model can be given
    cache: Any = None

    def advance(self, model: nn.Module) -> "tuple[Tensor, Seeing]":
        """Return the likeliest next token of the prompt ([1]) and the state with the model's new cache."""
        length = self.input_ids.shape[1]
        num_new = length if self.cache is None else 1
        given: dict[str, Any] = {"use_cache": self.may_cache, **self._places(num_new)}
        if "logits_to_keep" in self.arguments:
            given["logits_to_keep"] = 1
        if self.cache is None:
            given |= {**self.seen, **{name: _longer(values, length) for name, values in self.per_token.items()}}
        else:
            given["past_key_values"] = self.cache
        outputs = model(input_ids=self.input_ids[:, -num_new:], **given)
        cache = getattr(outputs, "past_key_values", None) if self.may_cache else None
        return outputs.logits[:1, -1].argmax(dim=-1), replace(self, cache=cache)

    @property
    def may_cache(self) -> bool:
        """Tell whether what was read may be kept: not where the model itself places the tokens of a padded prompt."""
        return not (self.has_own_positions and not bool(self.attention_mask[0].all()))

    @property
    def has_own_positions(self) -> bool:
        """Tell whether the model works out where its tokens stand."""
        return _OWN_POSITIONS in self.per_token

    def _places(self, num_new: int) -> dict[str, Tensor]:
        """Return the mask and the positions; a model that has kept its own is given neither for the next token."""
        if self.has_own_positions:
            return {"attention_mask": self.attention_mask} if self.cache is None else {}
        positions = (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        told = {"position_ids": positions[:, -num_new:]} if "position_ids" in self.arguments else {}
        return {"attention_mask": self.attention_mask, **told}

    def followed_by(self, chosen: Tensor) -> "Seeing":
        """Return the state one token later; chosen is [1]."""
        token = chosen.expand(len(self.input_ids))[:, None]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, token], dim=1),
            attention_mask=torch.cat([self.attention_mask, torch.ones_like(token)], dim=1),
        )


def seeing(model: nn.Module, prompt: Prompt, *, pad_id: int, device: torch.device) -> Seeing:
    """Return the state before the first token; the rows are padded on the left."""
    rows = [prompt.input_ids, prompt.beside] if prompt.beside else [prompt.input_ids]
    return Seeing(
        input_ids=_padded(rows, with_value=pad_id).to(device),
        attention_mask=_padded([[1] * len(row) for row in rows], with_value=0).to(device),
        seen={name: value.to(device) for name, value in prompt.inputs.items()},
        per_token={name: _padded(values, with_value=0).to(device) for name, values in prompt.per_token.items()},
        arguments=frozenset(inspect.signature(innermost(model).forward).parameters),
    )


def _padded(rows: Sequence[Sequence[int]], *, with_value: int) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[with_value] * (longest - len(row)) + list(row) for row in rows])


def _longer(values: Tensor, length: int) -> Tensor:
    """Return the values of the tokens, 0 for those that have been written since."""
    return nn.functional.pad(values, (0, length - values.shape[1]))
