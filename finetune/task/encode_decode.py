"""Greedy answers of an encoder-decoder: the source is encoded once, the answer grows token by token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from finetune.task.forward import innermost


@dataclass(frozen=True)
class Decoding:
    """What the encoder has read and the decoder has written so far.

    Every forward pass goes through the model as it is wrapped: parameters that are split are then gathered.
    """

    source_ids: Tensor  # [batch, longest source], padded on the right: positions then count from the beginning
    source_mask: Tensor  # [batch, longest source]
    written: Tensor  # [batch, length], from the token on that a decoder begins with
    encoded: BaseModelOutput | None = None
    cache: Any = None

    def advance(self, model: nn.Module) -> tuple[Tensor, "Decoding"]:
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

    def followed_by(self, chosen: Tensor) -> "Decoding":
        """Return the state one token later; chosen is [batch]."""
        return replace(self, written=torch.cat([self.written, chosen[:, None]], dim=1))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Tell whether the model inside all wrappers has an encoder and a decoder."""
    return bool(getattr(getattr(innermost(model), "config", None), "is_encoder_decoder", False))


def begun(model: nn.Module, sources: Sequence[Sequence[int]], *, pad_id: int, device: torch.device) -> Decoding:
    """Return the state before the first token."""
    longest = max(map(len, sources))
    source_ids = torch.tensor([[*source, *[pad_id] * (longest - len(source))] for source in sources], device=device)
    mask = torch.tensor([[1] * len(source) + [0] * (longest - len(source)) for source in sources], device=device)
    written = torch.full((len(sources), 1), _start_id(model, pad_id=pad_id), device=device)
    return Decoding(source_ids, mask, written)


def _start_id(model: nn.Module, *, pad_id: int) -> int:
    """Return the token that the decoder begins with."""
    inner: Any = innermost(model)
    for config in (inner.config, getattr(inner, "generation_config", None)):
        start = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return int(start)
    return pad_id
