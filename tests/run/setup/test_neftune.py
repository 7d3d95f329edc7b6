"""Noise on the embeddings is a function of only the step and the sample."""

import math

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, T5Config, T5ForConditionalGeneration

from finetune.data.batch import Batch
from finetune.errors import ModelError
from finetune.run.setup.patches import add_embedding_noise, sample_noise
from tests.refusals import refused

WIDTH, ALPHA = 6, 5.0
LENGTHS = {1: 3, 2: 5, 3: 2}


class Embedder(nn.Module):
    """A model that consists of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.config = PretrainedConfig()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


def padded(*samples: int, seed: int = 7) -> Batch:
    lengths = tuple(LENGTHS[sample] for sample in samples)
    ids = torch.ones((len(samples), max(lengths)), dtype=torch.int64)
    return Batch({"input_ids": ids}, ids, 1, sum(lengths), samples, seed=seed, lengths=lengths)


def end_to_end(*samples: int) -> Batch:
    lengths = tuple(LENGTHS[sample] for sample in samples)
    ids = torch.ones((1, sum(lengths)), dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Batch({"input_ids": ids}, ids, 1, sum(lengths), samples, ends, max(lengths), seed=7, lengths=lengths)


def noise(batch: Batch) -> torch.Tensor:
    return sample_noise(batch, torch.zeros((*batch.inputs["input_ids"].shape, WIDTH)), alpha=ALPHA)


def test_neftune_noise_is_uniform_within_the_bounds_of_the_paper_and_zero_on_padding():
    drawn = noise(padded(1, 2))
    assert not drawn[0, 3:].any()
    for row, length in ((0, 3), (1, 5)):
        bound = ALPHA / math.sqrt(length * WIDTH)
        assert 0.7 * bound < drawn[row, :length].abs().max() <= bound
    many = sample_noise(padded(2), torch.zeros((1, 5, 20_000)), alpha=ALPHA) * math.sqrt(5 * 20_000) / ALPHA
    assert many.mean().abs() < 0.01 and many.square().mean().item() == pytest.approx(1 / 3, rel=0.02)


def test_a_sample_has_the_same_noise_in_any_batch():
    alone = noise(padded(2))[0]
    assert torch.equal(noise(padded(1, 2, 3))[1], alone)
    assert torch.equal(noise(end_to_end(3, 2, 1))[0, 2:7], alone)
    assert not torch.equal(noise(padded(2, seed=8))[0], alone)


def test_only_training_batches_get_embedding_noise():
    model, batch = Embedder(), padded(1, 2)
    quiet = model(batch.inputs["input_ids"])
    tell = add_embedding_noise(model, alpha=ALPHA)
    assert torch.equal(model(batch.inputs["input_ids"]), quiet)
    tell(batch)
    torch.testing.assert_close(model(batch.inputs["input_ids"]), quiet + noise(batch))
    assert torch.equal(model(batch.inputs["input_ids"]), quiet)  # a decoder that shares them


def test_an_encoders_embeddings_are_noisy_and_its_decoders_are_not():
    config = T5Config(vocab_size=10, d_model=WIDTH, d_kv=2, d_ff=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model, batch = T5ForConditionalGeneration(config).eval(), padded(2)
    tell, heard = add_embedding_noise(model, alpha=ALPHA), []
    for stack in (model.encoder, model.decoder):
        stack.embed_tokens.register_forward_hook(lambda module, ids, output: heard.append(output))
    ids = batch.inputs["input_ids"]
    tell(batch)
    model(input_ids=ids, decoder_input_ids=ids)
    torch.testing.assert_close(heard[0], heard[1] + noise(batch))


def test_a_model_that_does_not_call_its_embeddings_is_rejected_with_embedding_noise():
    tell = add_embedding_noise(Embedder(), alpha=ALPHA)
    tell(padded(1))
    with refused(ModelError, "train.embedding_noise: "):
        tell(padded(1))


def test_a_model_without_embeddings_is_refused():
    with refused(ModelError, "Linear"):
        add_embedding_noise(nn.Linear(2, 2), alpha=ALPHA)
