"""Every encoder that is listed as isolating samples gives in a packed row the outputs of a padded batch."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification
from transformers.masking_utils import sliding_window_bidirectional_mask_function

from finetune.data.features import Features
from finetune.errors import ModelError
from finetune.memory.tracer import LiveBytes
from finetune.model.attention import sample_attention as sample_attention_module
from finetune.model.attention.implementation import (
    attend_sample_by_sample,
    check_isolation,
    default_attention,
    register_per_sample,
)
from finetune.model.attention.sample_attention import (
    MAX_QUERY_BLOCK,
    AttentionSettings,
    QueryKeyValue,
    bidirectional_attention,
    causal_attention,
    padded_attention,
)
from finetune.model.attention.supported_models import (
    PACKING_ENCODER_TYPES,
    PACKING_MODEL_TYPES,
    padding_reason,
)
from finetune.model.attention.upstream import patch_row_functions
from finetune.runtime.parallel import SampleLengths
from finetune.task import model_inputs
from finetune.task.model_inputs import collate_row, forward_logits, sample_logits
from tests.model.attention.small_models import LENGTHS, tiny_config
from tests.refusals import refused

PAD = 1
HEADS = (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForMaskedLM)
SMALL = {"modernbert": {"local_attention": 8, "num_hidden_layers": 3}, "ultrabert": {"num_hidden_layers": 3}}
"""Windows that are shorter than samples, and a layer of each kind."""

DECODERS = sorted(
    kind
    for kind in PACKING_MODEL_TYPES
    if type(tiny_config(kind)) in AutoModelForSequenceClassification._model_mapping.keys()  # noqa: SIM118
)


def texts(lengths=LENGTHS, *, seed=0):
    draw = np.random.default_rng(seed)
    return [Features({"input_ids": draw.integers(2, 97, length).astype(np.uint32)}) for length in lengths]


def row_of(features):
    return collate_row(
        features, {"input_ids": [each.arrays["input_ids"] for each in features]}, labels=torch.zeros(len(features))
    )


def padded(features):
    longest = max(each.length for each in features)
    ids, mask = torch.full((len(features), longest), PAD), torch.zeros(len(features), longest, dtype=torch.long)
    for place, each in enumerate(features):
        ids[place, : each.length] = torch.from_numpy(each.arrays["input_ids"].astype(np.int64))
        mask[place, : each.length] = 1
    return {"input_ids": ids, "attention_mask": mask}


def models(kind, head, **others):
    """Return a model with our attention, and a copy with transformers' own."""
    config = tiny_config(kind, **{"pad_token_id": PAD, "num_labels": 3, **SMALL.get(kind, {}), **others})
    register_per_sample()
    patch_row_functions(tiny_config(kind))
    made = []
    for attention in ("per_sample", "eager"):
        torch.manual_seed(0)
        made.append(head.from_config(copy.deepcopy(config), attn_implementation=attention).eval())
    assert made[0].config._attn_implementation == "per_sample"
    return made


def logits_of(model, features):
    """Return the logits of each text of a row: those of its head, or of its tokens."""
    batch = row_of(features)
    if isinstance(model, tuple(AutoModelForSequenceClassification._model_mapping.values())):
        return list(sample_logits(model, batch))
    return list(torch.split(forward_logits(model, batch)[0], batch.lengths))


def expected_logits(model, features):
    given = padded(features)
    logits = model(**given).logits
    if logits.dim() == 2:
        return list(logits)
    return [row[: each.length] for row, each in zip(logits, features, strict=True)]


def loss_and_gradient(model, logits):
    """Return a loss of the logits, and the gradient of all parameters."""
    model.zero_grad()
    loss = sum(each.log_softmax(dim=-1)[..., 0].sum() for each in logits)
    loss.backward()
    found = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    assert sum(len(each) for each in found) > 1000
    return torch.stack([loss.detach()]), torch.cat(found)


def apart(one, other):
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.mark.parametrize("head", HEADS, ids=["sequence", "token", "masked"])
@pytest.mark.parametrize("kind", sorted(PACKING_ENCODER_TYPES))
def test_a_text_in_a_row_is_the_text_in_a_padded_batch(kind, head):
    ours, theirs = models(kind, head)
    assert padding_reason(ours.config) is None
    assert default_attention(ours.config) == "per_sample"
    features = texts()
    found, expected = logits_of(ours, features), expected_logits(theirs, features)
    assert apart(torch.cat(found), torch.cat(expected)) < 1e-5
    for mine, other in zip(loss_and_gradient(ours, found), loss_and_gradient(theirs, expected), strict=True):
        assert ((mine - other).norm() / other.norm()).item() < 1e-5


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_reads_its_class_at_the_last_token_of_each_text(kind):
    ours, theirs = models(kind, AutoModelForSequenceClassification)
    features = texts()
    features[2].arrays["input_ids"][-2:] = PAD  # a text that ends with the padding token: read at the token before
    found, expected = logits_of(ours, features), expected_logits(theirs, features)
    assert apart(torch.stack(found), torch.stack(expected)) < 1e-5
    for mine, other in zip(loss_and_gradient(ours, found), loss_and_gradient(theirs, expected), strict=True):
        assert ((mine - other).norm() / other.norm()).item() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "values"), [("modernbert", {"classifier_pooling": "mean"}), ("eurobert", {"classifier_pooling": "mean"})]
)
def test_a_mean_over_the_text_is_that_of_a_padded_batch(kind, values):
    ours, theirs = models(kind, AutoModelForSequenceClassification, **values)
    features = texts()
    assert apart(torch.stack(logits_of(ours, features)), torch.stack(expected_logits(theirs, features))) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["roberta", "bert"])
def test_padding_tokens_within_a_text_take_the_positions_that_the_model_gives_them(kind):
    ours, theirs = models(kind, AutoModelForTokenClassification)
    features = texts((9, 5))
    features[0].arrays["input_ids"][3] = PAD
    assert apart(torch.cat(logits_of(ours, features)), torch.cat(expected_logits(theirs, features))) < 1e-5


def test_the_body_is_restored_after_a_forward_pass_and_after_a_failed_one(monkeypatch):
    model, _ = models("bert", AutoModelForSequenceClassification)
    features = texts()
    logits_of(model, features)
    assert "forward" not in model.base_model.__dict__
    monkeypatch.setattr(model.classifier, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits_of(model, features)
    assert "forward" not in model.base_model.__dict__


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("length", "window"), [(9, None), (9, 4), (9, 9), (2 * MAX_QUERY_BLOCK + 7, 5)])
def test_a_bidirectional_window_reaches_to_both_sides(length, window, softcap):
    torch.manual_seed(0)
    qkv = QueryKeyValue(*(torch.randn(2, heads, length, 8) for heads in (4, 2, 2)))
    found = bidirectional_attention(qkv, AttentionSettings(softcap=softcap, window=window, is_causal=False))
    sees = sliding_window_bidirectional_mask_function((window or length) - 1)
    positions = torch.arange(length)
    mask = sees(0, 0, positions[:, None], positions[None])
    scores = qkv.query @ qkv.repeated.key.transpose(2, 3) / 8**0.5
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    expected = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1) @ qkv.repeated.value
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)


@pytest.mark.parametrize("window", [None, 6])
def test_soft_capped_blocks_are_the_whole_and_keep_memory_in_proportion_to_the_length(monkeypatch, window):
    settings, kept = AttentionSettings(softcap=2.0, window=window), {}
    monkeypatch.setattr(sample_attention_module, "MAX_QUERY_BLOCK", 8)
    for length in (64, 128):
        chance = torch.Generator().manual_seed(length)
        qkv = QueryKeyValue(*(torch.randn(1, heads, length, 4, generator=chance) for heads in (4, 2, 2)))
        found = []
        for limit in (length, 8):  # whole, in blocks
            monkeypatch.setattr(sample_attention_module, "MAX_CAPPED_LENGTH", limit)
            inputs = QueryKeyValue(*(tensor.clone().requires_grad_() for tensor in qkv))
            with LiveBytes() as live:
                output = causal_attention(inputs, settings)
            kept[length, limit == 8] = live.now
            found.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
        for whole, in_blocks in zip(*found, strict=True):
            torch.testing.assert_close(in_blocks, whole)
    assert kept[128, False] > 3.5 * kept[64, False] and kept[128, True] < 2.2 * kept[64, True]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bidirectional_attention_over_a_padded_batch_equals_attention_per_sample(window, softcap):
    torch.manual_seed(0)
    settings = AttentionSettings(softcap=softcap, window=window, is_causal=False)
    qkv = [torch.randn(1, heads, sum(LENGTHS), 8, requires_grad=True) for heads in (4, 2, 2)]
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    found = []
    for attend in (
        lambda each: padded_attention(each, edges, max(LENGTHS), settings),
        lambda each: attend_sample_by_sample(each, SampleLengths(LENGTHS), settings),
    ):
        output = attend(QueryKeyValue(*qkv))
        weights = torch.arange(output.numel()).view(output.shape).sin()
        found.append([output, *torch.autograd.grad((output * weights).sum(), qkv)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def prove(model, *, is_half=False):
    """Run the check of a run's start on the model."""

    def of_row(row):
        return torch.stack(logits_of(model, [Features({"input_ids": np.array(ids, np.uint32)}) for ids in row]))

    def alone(ids):
        return model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits

    settings = {"config": model.config, "vocabulary_size": 97, "is_half": is_half}
    check_isolation(of_row, **settings, logits_alone=alone)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert", "llama"])
def test_a_classifier_of_one_score_passes_the_check_of_a_start_however_small_its_scores(kind):
    for seed in range(5):
        model, _ = models(kind, AutoModelForSequenceClassification, num_labels=1)
        torch.manual_seed(seed)
        list(model.parameters())[-1 if kind == "llama" else -2].normal_(std=0.01)  # the weight of the last layer
        prove(model)
        prove(model.bfloat16(), is_half=True)


@torch.no_grad()
def test_a_classifier_that_mixes_samples_or_does_not_reset_positions_is_rejected(monkeypatch):
    _, mixing = models("bert", AutoModelForSequenceClassification)  # transformers' own attention, told nothing
    with refused(ModelError, "`bert`"):
        prove(mixing)
    shifted, _ = models("roberta", AutoModelForSequenceClassification)
    monkeypatch.setattr(model_inputs, "_positions", lambda *_: {})
    with refused(ModelError, "`roberta`"):
        prove(shifted)
