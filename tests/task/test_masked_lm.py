"""Masked language: what is hidden, how much of it, and that no batch or world size decides it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.task import MaskedLmSection, TaskSection
from finetune.data.batch import IGNORED
from finetune.data.encoding.text import MaskedTextEncoder
from finetune.errors import DataError
from finetune.task.causal_lm import MaskedLmTask
from finetune.task.protocol import TaskContext
from tests.refusals import pinned, refused

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = ["play", "##ing", "##ed", "run", "##ner", "the", "dog", "##s", "a", "cat"]
TEXT = "the dogs played the runner a cat playing dogs the cat played a dog runner the cats " * 3


@pytest.fixture(scope="module")
def pieces():
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *PIECES])}
    backend = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def made(pieces, *, max_length=256, over_length="refuse", **masked):
    data = DataSection(train=TrainingSourceSection(path="/no.jsonl"), max_length=max_length, over_length=over_length)
    return MaskedLmTask(TaskContext(TaskSection(name="masked_lm", masked_lm=MaskedLmSection(**masked)), data, pieces))


def sample(task, *, sample_id=0, seed=0, text=TEXT):
    (features,) = task.encode([{"text": text}])
    return replace(features, sample_id=sample_id, seed=seed)


def test_the_configured_number_of_tokens_is_masked_and_no_special_one(pieces):
    task = made(pieces, fraction=0.15)
    features = sample(task)
    num_ordinary = features.length - 2
    batch = task.collate([features])
    assert batch.num_targets == round(0.15 * num_ordinary)
    hidden = batch.labels[0] != IGNORED
    assert not hidden[0] and not hidden[-1]
    original = torch.from_numpy(features.arrays["input_ids"].astype(np.int64))
    assert torch.equal(batch.labels[0][hidden], original[hidden])
    assert torch.equal(batch.inputs["input_ids"][0][~hidden], original[~hidden])


def test_masked_positions_depend_only_on_seed_and_sample(pieces):
    task = made(pieces)
    first, second = sample(task, sample_id=1, seed=9), sample(task, sample_id=2, seed=9)
    together, alone = task.collate([first, second]), task.collate([second])
    assert torch.equal(together.inputs["input_ids"][1], alone.inputs["input_ids"][0])
    assert torch.equal(together.labels[1], alone.labels[0])
    assert not torch.equal(together.labels[0], together.labels[1])
    later = task.collate([replace(second, seed=10)])
    assert not torch.equal(later.labels, alone.labels)


def test_eight_of_ten_are_masked_one_is_random_and_one_is_kept(pieces):
    task = made(pieces, fraction=0.5)
    batch = task.collate([sample(task, sample_id=number) for number in range(200)])
    hidden = batch.labels != IGNORED
    shown, right = batch.inputs["input_ids"][hidden], batch.labels[hidden]
    assert float((shown == 4).float().mean()) == pytest.approx(0.8, abs=0.02)
    random = shown[(shown != 4) & (shown != right)]
    assert float(len(random) / len(shown)) == pytest.approx(0.1 * 0.9, abs=0.02)  # one of ten is drawn right by chance
    assert int(random.min()) >= len(SPECIAL)


def test_whole_words_are_masked(pieces):
    task = made(pieces, fraction=0.3, whole_words=True)
    features = sample(task)
    words = np.cumsum(features.arrays["is_word_start"])
    wanted = round(0.3 * (features.length - 2))
    for number in range(20):
        batch = task.collate([replace(features, sample_id=number)])
        hidden = (batch.labels[0] != IGNORED).numpy()
        assert hidden[np.isin(words, words[hidden])].all()
        assert wanted - 1 <= hidden.sum() <= wanted


def test_a_whole_word_is_masked_even_if_one_token_would_suffice(pieces):
    task = made(pieces, fraction=0.01, whole_words=True)
    assert task.collate([sample(task, text="playing")]).num_targets == 2
    assert made(pieces, fraction=0.01).collate([sample(task, text="playing")]).num_targets == 1


def test_each_window_of_a_long_text_keeps_its_frame_and_no_token_is_lost(pieces):
    task = made(pieces, max_length=12, over_length="split")
    features = sample(task)
    windows, counts = task.samples.length_limit.shorten(features)
    ids = [window.arrays["input_ids"].tolist() for window in windows]
    assert all(each[0] == 2 and each[-1] == 3 and len(each) <= 12 for each in ids)
    assert [token for each in ids for token in each[1:-1]] == features.arrays["input_ids"].tolist()[1:-1]
    assert counts.dropped_tokens == 0
    (short,), _ = made(pieces, max_length=12, over_length="truncate").samples.length_limit.shorten(features)
    assert short.arrays["input_ids"].tolist() == [*features.arrays["input_ids"].tolist()[:11], 3]


def test_a_text_without_anything_to_hide_is_left_out(pieces):
    task = made(pieces)
    assert task.encode([{"text": ""}, {"text": "zebra"}]) == [None, None]
    (outcome,) = task.encode([{"messages": []}])
    pinned(outcome, "`masked_lm`")


def test_a_tokenizer_without_a_mask_is_refused_until_one_is_added(tokenizer, data):
    materials = TaskContext(TaskSection(name="masked_lm"), data, copy.deepcopy(tokenizer))
    with refused(DataError, "new_tokens: {special: ['<mask>']}"):
        MaskedLmTask(materials)
    materials.tokenizer.add_tokens(["<mask>"], special_tokens=True)
    MaskedLmTask(materials)
    assert materials.tokenizer.mask_token == "<mask>"


def test_whole_word_masking_needs_a_tokenizer_with_word_boundaries():
    class Slow:
        is_fast = False

    with refused(DataError, "whole_words: false"):
        MaskedTextEncoder(Slow(), words=True)


def test_loss_and_metrics_are_of_the_hidden_tokens(pieces):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = BertForMaskedLM(config).eval()
    task = made(pieces)
    short, long = sample(task, text="a cat"), sample(task, sample_id=1)
    with torch.no_grad():
        sums = task.evaluate_batch(model, task.collate([short, long])).sums
        apart = [task.evaluate_batch(model, task.collate([each])).sums for each in (short, long)]
    assert float(sums["loss_sum"]) == pytest.approx(sum(float(each["loss_sum"]) for each in apart), rel=1e-5)
    metrics = task.metrics({name: float(value) for name, value in sums.items()})
    assert set(metrics) == {"loss", "perplexity", "masked_accuracy"}
    assert task.metrics({"num_targets": 0.0, "loss_sum": 0.0, "num_correct": 0.0}).keys() == metrics.keys()
