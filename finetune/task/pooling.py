"""Heads that read whole samples, such as a classifier's, for samples that share one row without padding.

The body of the model computes the row. Its output is passed to the model's own head as a padded batch of samples, so
that the head (first token, mean, last token before the padding) works as usual.
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
    """Return the outputs of a head that reads whole samples, for each sample of a row, [samples, outputs]."""
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
    """Return the values of a row's tokens, [tokens, ...], padded by sample: [samples, longest, ...]."""
    ends, mask = batch.cumulative_lengths, _mask(batch)
    assert ends is not None, "only an unpadded row is split"
    indices = ends[:-1, None].long() + torch.arange(batch.longest, device=ends.device)
    by_sample = values[torch.where(mask, indices, 0)]
    is_padding = ~mask.view(*mask.shape, *[1] * (values.dim() - 1))
    return by_sample.masked_fill(is_padding, filled_with)


def _mask(batch: Batch) -> Tensor:
    """Return the mask of tokens in the padded samples, [samples, longest]."""
    ends = batch.cumulative_lengths
    assert ends is not None, "only an unpadded row has boundaries"
    return torch.arange(batch.longest, device=ends.device) < ends.diff()[:, None]


@contextmanager
def _body_computes_row(model: Any, inputs: Mapping[str, Any], batch: Batch) -> Iterator[None]:
    """In this context, pass the row to the model's body, and its output as padded samples to the head."""
    body: Any = model.base_model
    original_forward = body.forward

    def forward(*_: Any, **padded: Any) -> Any:
        others = {name: value for name, value in padded.items() if name not in _INPUTS_OF_BODY}
        output: Any = original_forward(**{**others, **inputs})
        hidden = output.last_hidden_state = pad_samples(output.last_hidden_state[0], batch)
        if hasattr(body, "pooler_activation"):  # ALBERT's pooler is a layer over the first tokens
            output.pooler_output = body.pooler_activation(body.pooler(hidden[:, 0]))
        elif getattr(body, "pooler", None) is not None:
            output.pooler_output = body.pooler(hidden)
        return output

    with replaced_forward(body, forward):
        yield
