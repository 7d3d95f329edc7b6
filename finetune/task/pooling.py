"""Heads that read a whole sample, such as a classifier's, where the samples share one row without padding.

The body of the model computes the row. Its output is handed to the model's own head sample by sample, as a padded
batch, so that whatever the head does (first token, mean, last token that is no padding) it does as in such a batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.task.model_inputs import forward_inputs, unwrap_model
from finetune.task.upstream import replaced_forward

_INPUTS_OF_BODY = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "inputs_embeds",
    "past_key_values",
    "cache",  # its name from transformers 5.24 on
)


def sample_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return what a head that reads whole samples makes of each sample of a row, [samples, outputs]."""
    inputs = forward_inputs(model, batch)
    inner: Any = unwrap_model(model)
    pad_id = inner.config.get_text_config().pad_token_id or 0
    padded = {
        "input_ids": pad_samples(batch.inputs["input_ids"][0], batch, filled_with=pad_id),
        "attention_mask": _mask(batch).long(),
        "use_cache": False,
    }
    with _body_computes_row(inner, inputs, batch):
        logits: Tensor = model(**padded).logits
    return logits


def pad_samples(values: Tensor, batch: Batch, *, filled_with: float = 0) -> Tensor:
    """Return what belongs to the tokens of a row, [tokens, ...], sample by sample: [samples, longest, ...]."""
    ends, mask = batch.cumulative_lengths, _mask(batch)
    assert ends is not None, "only a row is padded"
    places = ends[:-1, None].long() + torch.arange(batch.longest, device=ends.device)
    found = values[torch.where(mask, places, 0)]
    beyond = ~mask.view(*mask.shape, *[1] * (values.dim() - 1))
    return found.masked_fill(beyond, filled_with)


def _mask(batch: Batch) -> Tensor:
    """Return which places of the samples hold a token, [samples, longest]."""
    ends = batch.cumulative_lengths
    assert ends is not None, "only a row has boundaries"
    return torch.arange(batch.longest, device=ends.device) < ends.diff()[:, None]


@contextmanager
def _body_computes_row(model: Any, inputs: Mapping[str, Any], batch: Batch) -> Iterator[None]:
    """Give the model's body the row in place of what the head is given, and the head the samples padded."""
    body: nn.Module = model.base_model
    own = body.forward

    def forward(*_: Any, **given: Any) -> Any:
        others = {name: value for name, value in given.items() if name not in _INPUTS_OF_BODY}
        output: Any = own(**{**others, **inputs})
        output.last_hidden_state = pad_samples(output.last_hidden_state[0], batch)
        if getattr(body, "pooler", None) is not None:
            output.pooler_output = _pooled(body, output.last_hidden_state)
        return output

    with replaced_forward(body, forward):
        yield


def _pooled(body: Any, hidden: Tensor) -> Tensor:
    """Return what the body's own pooler makes of each sample; ALBERT's is given the first tokens."""
    pooled: Tensor
    if hasattr(body, "pooler_activation"):
        pooled = body.pooler_activation(body.pooler(hidden[:, 0]))
    else:
        pooled = body.pooler(hidden)
    return pooled
