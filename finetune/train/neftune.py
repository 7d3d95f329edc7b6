"""NEFTune (Jain et al., 2023, arXiv:2310.05914): uniform noise on the embeddings in training.

A sample's noise is a function of the step's seed and the sample's id: it depends neither on the number of processes nor
on how the global batch is split, and a resumed run draws the same noise.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from finetune.data.batch import Batch
from finetune.errors import ModelError
from finetune.runtime.seeds import derive_seed


class EmbeddingNoise:
    """Adds noise to the next output of the model's input embeddings once a batch has been set."""

    def __init__(self, model: Any, *, alpha: float) -> None:
        """Raises ModelError for a model without input embeddings; `model` may be wrapped afterwards."""
        try:
            is_pair = getattr(model.config, "is_encoder_decoder", False)
            embeddings = (model.get_encoder() if is_pair else model).get_input_embeddings()
        except (AttributeError, NotImplementedError):
            embeddings = None
        if not isinstance(embeddings, nn.Module):
            raise ModelError(f"train.embedding_noise: {type(model).__name__} has no input embeddings. Remove it.")
        self._alpha = alpha
        self._batch: Batch | None = None
        embeddings.register_forward_hook(self._add)

    def set_batch(self, batch: Batch) -> None:
        """Set the next training batch; without one, as in evaluations, no noise is added.

        Raises ModelError if the model did not call its input embeddings for the previous batch.
        """
        if self._batch is not None:
            raise ModelError(
                "train.embedding_noise: this model does not call its input embeddings, so it gets no noise. Remove it."
            )
        self._batch = batch

    def _add(self, module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        batch, self._batch = self._batch, None  # a decoder that shares the module with its encoder gets none
        return output if batch is None else output + sample_noise(batch, output, alpha=self._alpha)


@torch.no_grad()
def sample_noise(batch: Batch, embedded: Tensor, *, alpha: float) -> Tensor:
    """Return the noise of the samples, [batch, length, width] like `embedded`; padding has none.

    A sample with L tokens of width d gets uniform values in alpha / sqrt(L * d) * [-1, 1).
    """
    noise = torch.zeros_like(embedded)
    width = embedded.shape[-1]
    is_row = batch.cumulative_lengths is not None
    start = 0
    for row, (sample_id, length) in enumerate(zip(batch.sample_ids, batch.lengths, strict=True)):
        target = noise[0, start:] if is_row else noise[row]
        generator = torch.Generator(noise.device).manual_seed(derive_seed(batch.seed, "embedding noise", sample_id))
        drawn = torch.rand((length, width), generator=generator, device=noise.device, dtype=torch.float32)
        target[:length] = ((2.0 * drawn - 1.0) * (alpha / math.sqrt(length * width))).to(noise.dtype)
        start += length
    return noise
