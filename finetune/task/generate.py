"""Greedy answers from a model under any strategy: every rank runs the same number of forward passes."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from finetune.task.encode_decode import begun, is_encoder_decoder
from finetune.task.forward import innermost
from finetune.task.learnt_prompt import has_learnt_prompt, rewriting


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    pad_id: int,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    device: torch.device,
    all_finished: Callable[[bool], bool],
    state: "State | None" = None,
) -> list[list[int]]:
    """Return for each prompt the tokens that the model continues it with, up to and with the first stop token.

    `all_finished` is told after every token whether this rank is done and answers whether all are; a rank without
    prompts takes part with a dummy and gets []. A `state` that has more than tokens to read is given in place of the
    prompts' own. The caller sets evaluation mode. Collective where `all_finished` is.
    """
    state = state or _begun(model, prompts or [[pad_id]], pad_id=pad_id, device=device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    is_finished = torch.full((max(1, len(prompts)),), not prompts, device=device)  # [batch]
    answers = []
    for _ in range(max_new_tokens):
        chosen, state = state.advance(model)
        chosen = torch.where(is_finished, pad_id, chosen)
        answers.append(chosen)
        is_finished = is_finished | torch.isin(chosen, stops)
        if all_finished(bool(is_finished.all())):
            break
        state = state.followed_by(chosen)
    rows = torch.stack(answers, dim=1).tolist() if answers else [[] for _ in prompts]
    return [_until_stop(row, stop_ids) for row in rows[: len(prompts)]]


class State(Protocol):
    """What has been read and written so far."""

    def advance(self, model: nn.Module) -> "tuple[Tensor, State]":
        """Return the likeliest next token of each row ([batch]) and the state with the model's new cache."""

    def followed_by(self, chosen: Tensor) -> "State":
        """Return the state one token later; chosen is [batch]."""


@dataclass(frozen=True)
class _Writing:
    """The state of a decoder alone; with a cache, only the newest token is given to the model."""

    input_ids: Tensor  # [batch, length]
    attention_mask: Tensor  # [batch, length]
    arguments: frozenset[str]  # names of what the model can be given
    cache: Any = None

    def advance(self, model: nn.Module) -> "tuple[Tensor, _Writing]":
        """Return the likeliest next token of each row ([batch]) and the state with the model's new cache."""
        positions = (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
        num_new = self.input_ids.shape[1] if self.cache is None else 1
        given: dict[str, Any] = {"attention_mask": self.attention_mask, "use_cache": True}
        if "position_ids" in self.arguments:
            given["position_ids"] = positions[:, -num_new:]
        if "logits_to_keep" in self.arguments:
            given["logits_to_keep"] = 1
        if self.cache is not None:
            given["past_key_values"] = self.cache
        outputs = model(input_ids=self.input_ids[:, -num_new:], **given)
        cache = getattr(outputs, "past_key_values", None)
        return outputs.logits[:, -1].argmax(dim=-1), replace(self, cache=cache)

    def followed_by(self, chosen: Tensor) -> "_Writing":
        """Return the state one token later; chosen is [batch]."""
        seen = torch.ones_like(chosen)[:, None]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, chosen[:, None]], dim=1),
            attention_mask=torch.cat([self.attention_mask, seen], dim=1),
        )


def _begun(model: nn.Module, prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> State:
    """Return the state before the first token; a decoder's prompts end, and so its answers begin, at one place."""
    if is_encoder_decoder(model):
        return begun(model, prompts, pad_id=pad_id, device=device)
    if has_learnt_prompt(model):
        return rewriting(prompts, pad_id=pad_id, device=device)
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return _Writing(input_ids, mask, _arguments(model))


def _arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that the model inside all wrappers can be given."""
    return frozenset(inspect.signature(innermost(model).forward).parameters)


def _until_stop(row: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
    return row[: end + 1]
