"""Greedy decoding by transformers' own `generate`, from a model under any strategy."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutput

from finetune.errors import ModelError
from finetune.runtime import distributed
from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import GenerationPrompt
from finetune.task.upstream import throttle_generate_sync, through_wrappers

_COMPUTED_BY_PEFT = frozenset({"position_ids", "cache", "past_key_values"})
"""Arguments that peft computes for prompt learning: of two caches, transformers 5.24 would ignore peft's prefix."""


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[GenerationPrompt],
    *,
    pad_id: int,
    stop_ids: frozenset[int],
    max_new_tokens: int,
    device: torch.device,
) -> list[list[int]]:
    """Return the tokens with which the model continues each prompt greedily, up to and including the first stop token.

    Prompts of text form one batch; a prompt with images, or for a model with prompt learning, is given alone. Every
    forward pass goes through the model's wrappers, and every rank runs as many as the longest answer of all needs. The
    model's own generation settings (sampling, penalties, forced tokens) do not count. The caller sets evaluation mode.
    Raises ModelError for a model that cannot generate. Collective.
    """
    inner = _require_generator(model)
    is_encoder_decoder, is_prompt_learning = inner.config.is_encoder_decoder, has_prompt_learning(model)
    inputs = _inputs(prompts, pad_id=pad_id, device=device, pads_right=is_encoder_decoder)
    settings = _greedy(inner, pad_id=pad_id, stop_ids=stop_ids, max_new_tokens=max_new_tokens)
    settings.use_cache = not is_prompt_learning
    if is_encoder_decoder:
        inputs["encoder_outputs"] = _encode(model, inputs, start_id=settings.decoder_start_token_id)
    dropped = _COMPUTED_BY_PEFT if is_prompt_learning else frozenset()
    with (
        _without_own_settings(inner),
        through_wrappers(model, inner, dropped=dropped),
        throttle_generate_sync(inner, max_new_tokens=max_new_tokens),
    ):
        sequences = inner.generate(
            **inputs,
            generation_config=settings,
            stopping_criteria=_stopping_criteria(prompts, stop_ids),
            synced_gpus=distributed.world() > 1,
        )
    answers = sequences[: len(prompts), 1 if is_encoder_decoder else inputs["input_ids"].shape[1] :]
    return [_until_stop(row, stop_ids) for row in answers.tolist()]


def _greedy(inner: Any, *, pad_id: int, stop_ids: frozenset[int], max_new_tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stop_ids) or None,
        pad_token_id=pad_id,
        decoder_start_token_id=_decoder_start_id(inner.config, inner.generation_config, pad_id=pad_id),
    )


def has_prompt_learning(model: nn.Module) -> bool:
    """Tell whether peft puts trained tokens, or keys and values, before the text (prompt and prefix tuning)."""
    inner: Any = model
    while inner is not None and not hasattr(inner, "peft_config"):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
    return inner is not None and any(each.is_prompt_learning for each in inner.peft_config.values())


def _require_generator(model: nn.Module) -> Any:
    """Return the innermost model; raises ModelError where it cannot generate."""
    inner = unwrap_model(model)
    if not isinstance(inner, GenerationMixin):
        raise ModelError(f"evaluate.generate: {type(inner).__name__} cannot generate text. Remove evaluate.generate.")
    return inner


@contextmanager
def _without_own_settings(model: Any) -> Iterator[None]:
    """Set the model's own generation settings aside: `generate` merges them with those that it is given."""
    own_settings, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own_settings


def _inputs(
    prompts: Sequence[GenerationPrompt], *, pad_id: int, device: torch.device, pads_right: bool
) -> dict[str, Any]:
    """Return what the model is given: the prompts' tokens, [batch, longest], and the images of the only prompt.

    A decoder's prompts are padded on the left, so that all answers begin at one position; an encoder's on the right.
    A companion row, which shows an image where the prompt shows none, stands below its prompt.
    """
    rows = [each.input_ids for each in prompts]
    first = prompts[0]
    if first.companion_ids:
        rows.append(first.companion_ids)
    pad = functools.partial(_pad, on_the_right=pads_right)
    inputs = {"input_ids": pad(rows, pad_id), "attention_mask": pad([[1] * len(row) for row in rows], 0)}
    inputs |= {name: pad(values, 0) for name, values in first.per_token.items()}
    return {name: tensor.to(device) for name, tensor in {**inputs, **first.inputs}.items()}


def _pad(rows: Sequence[Sequence[int]], value: int, *, on_the_right: bool) -> Tensor:
    longest = max(map(len, rows))
    pads = [[value] * (longest - len(row)) for row in rows]
    return torch.tensor([[*row, *pad] if on_the_right else [*pad, *row] for row, pad in zip(rows, pads, strict=True)])


def _decoder_start_id(*configs: Any, pad_id: int) -> int:
    """Return the token with which a decoder starts: the first that a config names, else padding."""
    named = (getattr(config, "decoder_start_token_id", None) for config in configs)
    return next((int(token) for token in named if token is not None), pad_id)


def _encode(model: nn.Module, inputs: dict[str, Any], *, start_id: int) -> BaseModelOutput:
    """Return the hidden states of the encoder, from a pass through the wrappers: `generate` calls it directly."""
    source = inputs["input_ids"]
    start = torch.full((len(source), 1), start_id, device=source.device)
    outputs = model(input_ids=source, attention_mask=inputs["attention_mask"], decoder_input_ids=start, use_cache=False)
    return BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)


def _stopping_criteria(prompts: Sequence[GenerationPrompt], stop_ids: frozenset[int]) -> StoppingCriteriaList:
    return StoppingCriteriaList([_CompanionsStop(stop_ids)] if prompts[0].companion_ids else [])


class _CompanionsStop(StoppingCriteria):  # type: ignore[misc]
    """Stops all rows where the first has stopped: the rows below it only accompany it."""

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self._stop_ids = sorted(stop_ids)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        stops = torch.tensor(self._stop_ids, dtype=input_ids.dtype, device=input_ids.device)
        return torch.isin(input_ids[0, -1], stops).expand(len(input_ids))


def _until_stop(row: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
    return row[: end + 1]
