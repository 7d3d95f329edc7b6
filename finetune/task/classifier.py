"""What the classifiers of texts and of words share: padded batches of them, and what the model's config must say."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.task.causal import pad_id


class Padding:
    """The token that fills up short texts: the tokenizer's, else its end-of-sequence, which becomes its padding.

    A decoder reads its answer off the last token that is not padding, which it knows by this id alone: the model's
    config and the tokenizer must name the same. A text that ends with the padding token itself (where that is
    end-of-sequence) has its answer read off the token before, alone as in any batch.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.token_id = pad_id(tokenizer)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token

    @property
    def head_values(self) -> Mapping[str, Any]:
        """Return what the model's config says of it."""
        return {"pad_token_id": self.token_id}

    def inputs(self, features: Sequence[Features]) -> dict[str, Tensor]:
        """Return what the model is given, [batch, length] each, padded on the right."""
        fillers = {"input_ids": self.token_id, "token_type_ids": 0}
        inputs = {
            name: padded([each.arrays[name] for each in features], filler)
            for name, filler in fillers.items()
            if name in features[0].arrays
        }
        lengths = torch.tensor([each.length for each in features])
        longest = inputs["input_ids"].shape[1]
        return {**inputs, "attention_mask": (torch.arange(longest)[None] < lengths[:, None]).long()}


def padded(arrays: Sequence[np.ndarray], filler: int) -> Tensor:
    """Return the arrays as rows of whole numbers, int64 [rows, longest], filled up on the right."""
    rows = np.full((len(arrays), max(map(len, arrays))), filler, np.int64)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(rows)


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's logits in float32: [batch, outputs], or [batch, length, outputs] of words."""
    logits: Tensor = model(**batch.inputs).logits
    return logits.to(torch.float32)
