"""Greedy decoding from a model under any strategy: every rank runs the same number of forward passes."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from finetune.task.model_inputs import unwrap_model
from finetune.task.protocol import GenerationPrompt


@dataclass(frozen=True)
class Seq2SeqDecodeState:
    """What the encoder has read and the decoder has written so far.

    Every forward pass goes through the model as it is wrapped: parameters that are split are then gathered.
    """

    source_ids: Tensor  # [batch, longest source], padded on the right: positions then count from the beginning
    source_mask: Tensor  # [batch, longest source]
    written: Tensor  # [batch, length], from the token on that a decoder begins with
    encoded: BaseModelOutput | None = None
    cache: Any = None

    def advance(self, model: nn.Module) -> tuple[Tensor, "Seq2SeqDecodeState"]:
        """Return the likeliest next token of each row, [batch], and the state with what the model remembers."""
        given: dict[str, Any] = {"attention_mask": self.source_mask, "use_cache": True}
        if self.encoded is None:
            outputs = model(input_ids=self.source_ids, decoder_input_ids=self.written, **given)
        else:
            new = self.written if self.cache is None else self.written[:, -1:]
            given |= {"encoder_outputs": self.encoded, "past_key_values": self.cache}
            outputs = model(decoder_input_ids=new, **given)
        encoded = self.encoded or BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
        cache = getattr(outputs, "past_key_values", None)
        return outputs.logits[:, -1].argmax(dim=-1), replace(self, encoded=encoded, cache=cache)

    def append_tokens(self, chosen: Tensor) -> "Seq2SeqDecodeState":
        """Return the state one token later; chosen is [batch]."""
        return replace(self, written=torch.cat([self.written, chosen[:, None]], dim=1))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Tell whether the model inside all wrappers has an encoder and a decoder."""
    return bool(getattr(getattr(unwrap_model(model), "config", None), "is_encoder_decoder", False))


def seq2seq_decode_state(
    model: nn.Module, sources: Sequence[Sequence[int]], *, pad_id: int, device: torch.device
) -> Seq2SeqDecodeState:
    """Return the state before the first token."""
    longest = max(map(len, sources))
    source_ids = torch.tensor([[*source, *[pad_id] * (longest - len(source))] for source in sources], device=device)
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources], device=device)
    written = torch.full((len(sources), 1), _start_id(model, pad_id=pad_id), device=device)
    return Seq2SeqDecodeState(source_ids, mask, written)


def _start_id(model: nn.Module, *, pad_id: int) -> int:
    """Return the token that the decoder begins with."""
    inner: Any = unwrap_model(model)
    for config in (inner.config, getattr(inner, "generation_config", None)):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    return pad_id


def has_prompt_learning(model: nn.Module) -> bool:
    """Tell whether peft puts learnt tokens, or keys and values, before the text (prompt and prefix tuning)."""
    inner: Any = model
    while inner is not None and not hasattr(inner, "peft_config"):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
    return inner is not None and any(each.is_prompt_learning for each in inner.peft_config.values())


@dataclass(frozen=True)
class UncachedDecodeState:
    """The state of such a model: all of the text, padded on the right as in training, and no cache."""

    rows: tuple[tuple[int, ...], ...]
    pad_id: int
    device: torch.device

    def advance(self, model: nn.Module) -> "tuple[Tensor, UncachedDecodeState]":
        """Return the likeliest next token of each row ([batch]); reads everything again."""
        lengths = torch.tensor([len(row) for row in self.rows], device=self.device)  # [batch]
        longest = int(lengths.max())
        padded = [[*row, *[self.pad_id] * (longest - len(row))] for row in self.rows]
        input_ids = torch.tensor(padded, device=self.device)
        mask = (torch.arange(longest, device=self.device) < lengths[:, None]).long()
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits[:, -longest:]
        return logits[torch.arange(len(self.rows), device=self.device), lengths - 1].argmax(dim=-1), self

    def append_tokens(self, chosen: Tensor) -> "UncachedDecodeState":
        """Return the state one token later; chosen is [batch]."""
        rows = tuple((*row, token) for row, token in zip(self.rows, chosen.tolist(), strict=True))
        return replace(self, rows=rows)


def uncached_decode_state(
    prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device
) -> UncachedDecodeState:
    """Return the state before the first token."""
    return UncachedDecodeState(tuple(tuple(prompt) for prompt in prompts), pad_id, device)


_OWN_POSITIONS = "mm_token_type_ids"
"""Models that are told which tokens are of an image (Qwen-VL) place these in two dimensions, and work it out."""


@dataclass(frozen=True)
class ImageDecodeState:
    """The state of a decoder that has read a prompt, and a row beside it where the prompt shows no image."""

    input_ids: Tensor  # [1 or 2, length]
    attention_mask: Tensor  # [1 or 2, length]
    seen: Mapping[str, Tensor]  # the images, as the model is given them
    per_token: Mapping[str, Tensor]  # [1 or 2, length of the prompt]
    arguments: frozenset[str]  # names of what the model can be given
    cache: Any = None

    def advance(self, model: nn.Module) -> "tuple[Tensor, ImageDecodeState]":
        """Return the likeliest next token of the prompt ([1]) and the state with the model's new cache."""
        length = self.input_ids.shape[1]
        num_new = length if self.cache is None else 1
        given: dict[str, Any] = {"use_cache": self.may_cache, **self._places(num_new)}
        if "logits_to_keep" in self.arguments:
            given["logits_to_keep"] = 1
        if self.cache is None:
            given |= {**self.seen, **{name: _pad_right(values, length) for name, values in self.per_token.items()}}
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

    def append_tokens(self, chosen: Tensor) -> "ImageDecodeState":
        """Return the state one token later; chosen is [1]."""
        token = chosen.expand(len(self.input_ids))[:, None]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, token], dim=1),
            attention_mask=torch.cat([self.attention_mask, torch.ones_like(token)], dim=1),
        )


def image_decode_state(
    model: nn.Module, prompt: GenerationPrompt, *, pad_id: int, device: torch.device
) -> ImageDecodeState:
    """Return the state before the first token; the rows are padded on the left."""
    rows = [prompt.input_ids, prompt.beside] if prompt.beside else [prompt.input_ids]
    return ImageDecodeState(
        input_ids=_pad_left(rows, with_value=pad_id).to(device),
        attention_mask=_pad_left([[1] * len(row) for row in rows], with_value=0).to(device),
        seen={name: value.to(device) for name, value in prompt.inputs.items()},
        per_token={name: _pad_left(values, with_value=0).to(device) for name, values in prompt.per_token.items()},
        arguments=frozenset(inspect.signature(unwrap_model(model).forward).parameters),
    )


def _pad_left(rows: Sequence[Sequence[int]], *, with_value: int) -> Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([[with_value] * (longest - len(row)) + list(row) for row in rows])


def _pad_right(values: Tensor, length: int) -> Tensor:
    """Return the values of the tokens, 0 for those that have been written since."""
    return nn.functional.pad(values, (0, length - values.shape[1]))


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
    state: "DecodeState | None" = None,
) -> list[list[int]]:
    """Return for each prompt the tokens that the model continues it with, up to and with the first stop token.

    `all_finished` is told after every token whether this rank is done and answers whether all are; a rank without
    prompts takes part with a dummy and gets []. A `state` that has more than tokens to read is given in place of the
    prompts' own. The caller sets evaluation mode. Collective where `all_finished` is.
    """
    state = state or _initial_state(model, prompts or [[pad_id]], pad_id=pad_id, device=device)
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
        state = state.append_tokens(chosen)
    rows = torch.stack(answers, dim=1).tolist() if answers else [[] for _ in prompts]
    return [_until_stop(row, stop_ids) for row in rows[: len(prompts)]]


class DecodeState(Protocol):
    """What has been read and written so far."""

    def advance(self, model: nn.Module) -> "tuple[Tensor, DecodeState]":
        """Return the likeliest next token of each row ([batch]) and the state with the model's new cache."""

    def append_tokens(self, chosen: Tensor) -> "DecodeState":
        """Return the state one token later; chosen is [batch]."""


@dataclass(frozen=True)
class _CausalDecodeState:
    """The state of a decoder alone; with a cache, only the newest token is given to the model."""

    input_ids: Tensor  # [batch, length]
    attention_mask: Tensor  # [batch, length]
    arguments: frozenset[str]  # names of what the model can be given
    cache: Any = None

    def advance(self, model: nn.Module) -> "tuple[Tensor, _CausalDecodeState]":
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

    def append_tokens(self, chosen: Tensor) -> "_CausalDecodeState":
        """Return the state one token later; chosen is [batch]."""
        seen = torch.ones_like(chosen)[:, None]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, chosen[:, None]], dim=1),
            attention_mask=torch.cat([self.attention_mask, seen], dim=1),
        )


def _initial_state(
    model: nn.Module, prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device
) -> DecodeState:
    """Return the state before the first token; a decoder's prompts end, and so its answers begin, at one place."""
    if is_encoder_decoder(model):
        return seq2seq_decode_state(model, prompts, pad_id=pad_id, device=device)
    if has_prompt_learning(model):
        return uncached_decode_state(prompts, pad_id=pad_id, device=device)
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.tensor([[pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return _CausalDecodeState(input_ids, mask, _arguments(model))


def _arguments(model: nn.Module) -> frozenset[str]:
    """Return the names of the arguments that the model inside all wrappers can be given."""
    return frozenset(inspect.signature(unwrap_model(model).forward).parameters)


def _until_stop(row: list[int], stop_ids: frozenset[int]) -> list[int]:
    end = next((place for place, token in enumerate(row) if token in stop_ids), len(row))
    return row[: end + 1]
