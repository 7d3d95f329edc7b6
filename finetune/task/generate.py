"""Greedy answers from a model under any strategy: every rank runs the same number of forward passes."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from finetune.task.forward import innermost


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
) -> list[list[int]]:
    """Return for each prompt the tokens that the model continues it with, up to and with the first stop token.

    `all_finished` is told after every token whether this rank is done and answers whether all are; a rank without
    prompts takes part with a dummy and gets []. The caller sets evaluation mode. Collective where `all_finished` is.
    """
    state = _start(prompts or [[pad_id]], pad_id=pad_id, device=device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.int64, device=device)
    is_finished = torch.full((len(state.input_ids),), not prompts, device=device)  # [batch]
    arguments = _arguments(model)
    answers = []
    for _ in range(max_new_tokens):
        chosen, state = _advance(model, state, arguments)
        chosen = torch.where(is_finished, pad_id, chosen)
        answers.append(chosen)
        is_finished = is_finished | torch.isin(chosen, stops)
        if all_finished(bool(is_finished.all())):
            break
        state = state.followed_by(chosen)
    rows = torch.stack(answers, dim=1).tolist() if answers else [[] for _ in prompts]
    return [_until_stop(row, stop_ids) for row in rows[: len(prompts)]]


@dataclass(frozen=True)
class _State:
    """What has been read and written so far; with a cache, only the newest token is given to the model."""

    input_ids: Tensor  # [batch, length]
    attention_mask: Tensor  # [batch, length]
    cache: Any = None

    def followed_by(self, chosen: Tensor) -> "_State":
        """Return the state one token later; chosen is [batch]."""
        seen = torch.ones_like(chosen)[:, None]
        return _State(
            torch.cat([self.input_ids, chosen[:, None]], dim=1),
            torch.cat([self.attention_mask, seen], dim=1),
            self.cache,
        )


def _start(prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> _State:
    """Pad on the left, so that every answer begins at the same place."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return _State(input_ids, mask)


def _advance(model: nn.Module, state: _State, arguments: frozenset[str]) -> tuple[Tensor, _State]:
    """Return the likeliest next token of each row ([batch]) and the state with the model's new cache."""
    positions = (state.attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    num_new = state.input_ids.shape[1] if state.cache is None else 1
    given: dict[str, Any] = {"attention_mask": state.attention_mask, "use_cache": True}
    if "position_ids" in arguments:
        given["position_ids"] = positions[:, -num_new:]
    if "logits_to_keep" in arguments:
        given["logits_to_keep"] = 1
    if state.cache is not None:
        given["past_key_values"] = state.cache
    outputs = model(input_ids=state.input_ids[:, -num_new:], **given)
    cache = getattr(outputs, "past_key_values", None)
    return outputs.logits[:, -1].argmax(dim=-1), _State(state.input_ids, state.attention_mask, cache)


def _arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that the model inside all wrappers can be given."""
    return frozenset(inspect.signature(innermost(model).forward).parameters)


def _until_stop(row: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
    return row[: end + 1]
