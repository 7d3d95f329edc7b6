"""Every task that may lay its samples end to end: the sums, records and gradients are those of padded batches."""

import copy

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)
from transformers import AutoModelForTokenClassification as TokenClassifier

from finetune.config.sections.data import BatchingSection
from finetune.config.sections.task import ClassificationSection, DistillationSection, TaskSection
from finetune.data.features import Features
from finetune.model.attention.implementation import register_per_sample
from finetune.task.answer_pairs import select_half, sequence_log_probabilities
from finetune.task.protocol import TaskContext, build_task
from tests.data.encoding.word_pieces import bert_tokenizer
from tests.task.pairs_of_words import JUDGED, PAIRS, encoded, nudged

TEXTS = ["a", "b c d", "playing", "a b new york plays !", "new york !", "a a"]
LABELS = {
    "single_label": list("xyxzyx"),
    "multi_label": [["x"], [], ["x", "y"], ["z"], ["y"], []],
    "regression": [0.5, -1.0, 2.0, 1.0, 0.0, 3.0],
}
TAGGED = [
    {"tokens": text.split(), "tags": ["O" if len(word) > 1 else "B-X" for word in text.split()]} for text in TEXTS
]


def both(section, data, tokenizer, *, rows=()):
    """Return the task with padding, and without."""
    layouts = (BatchingSection(padding_free=False), BatchingSection(padding_free=True))
    return [
        build_task(TaskContext(section, data.model_copy(update={"batching": each}), tokenizer, rows=lambda: rows))
        for each in layouts
    ]


def small(auto, kind="bert", **head):
    register_per_sample()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model(kind, vocab_size=14, initializer_range=0.5, **sizes, **head)
    return auto.from_config(config, attn_implementation="per_sample").eval()


def llama(tokenizer, kind=LlamaForCausalLM, **head):
    register_per_sample()
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes, **head)
    config._attn_implementation = "per_sample"
    return kind(config).eval()


def samples_of(task, rows):
    return [Features(each.arrays, number, seed=3) for number, each in enumerate(task.encode(rows))]


def assert_alike(padded, free, samples, model):
    """Compare the sums of a step in two cuts with those padded, the gradients, and what evaluations keep."""
    found = []
    for task, cuts in ((padded, [samples]), (free, [samples]), (free, [samples[:2], samples[2:]])):
        model.zero_grad()
        batches = task.prepare_step(model, [task.collate(cut) for cut in cuts])
        assert all((batch.cumulative_lengths is not None) is (task is free) for batch in batches)
        assert all(batch.positions[0] == 1 for batch in batches if task is free)
        sums = [task.loss_sums(model, batch) for batch in batches]
        sum(each["loss_sum"] for each in sums).backward()
        gradient = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        totals = {name: sum(each[name].item() for each in sums) for name in sums[0]}
        with torch.no_grad():
            kept = [task.evaluate_batch(model, batch) for batch in batches]
            filler = task.evaluate_batch(model, task.dummy_batch(samples[0]))
        records = [each.records for each in (*kept, filler) if each.records is not None]
        ordered = torch.cat(records) if records else None
        evaluated = {name: sum(float(each.sums[name]) for each in (*kept, filler)) for name in kept[0].sums}
        counts = sum(each.num_targets for each in batches), sum(each.num_tokens for each in batches)
        found.append((totals, gradient, task.metrics(evaluated, ordered), ordered, counts))
    for totals, gradient, metrics, records, counts in found[1:]:
        assert totals == pytest.approx(found[0][0], rel=1e-5, abs=1e-5)
        assert ((gradient - found[0][1]).norm() / found[0][1].norm()).item() < 1e-5
        assert metrics == pytest.approx(found[0][2], rel=1e-5, abs=1e-5, nan_ok=True)
        assert records is None or records[:, 0].tolist() == found[0][3][:, 0].tolist()
        assert counts == found[0][4]


@pytest.mark.parametrize("kind", sorted(LABELS))
@pytest.mark.parametrize("has_pairs", [False, True], ids=["texts", "pairs"])
def test_text_classification(data, kind, has_pairs):
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS[kind], strict=True)]
    if has_pairs:
        rows = [{**row, "text_pair": other} for row, other in zip(rows, reversed(TEXTS), strict=True)]
    section = TaskSection(name="text_classification", classification=ClassificationSection(kind=kind))
    padded, free = both(section, data, bert_tokenizer(), rows=rows)
    model = small(AutoModelForSequenceClassification, **padded.head_values)
    samples = samples_of(padded, rows)
    assert_alike(padded, free, samples, model)
    assert {"input_ids", "token_type_ids", "position_ids"} == set(free.collate(samples).inputs)


def test_token_classification(data):
    padded, free = both(TaskSection(name="token_classification"), data, bert_tokenizer(), rows=TAGGED)
    model = small(TokenClassifier, **padded.head_values)
    assert_alike(padded, free, samples_of(padded, TAGGED), model)


def test_masked_lm(data):
    tokenizer = bert_tokenizer()
    tokenizer.mask_token = "!"
    padded, free = both(TaskSection(name="masked_lm"), data, tokenizer)
    samples = samples_of(padded, [{"text": text} for text in TEXTS])
    assert_alike(padded, free, samples, small(AutoModelForMaskedLM, pad_token_id=0))


@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "robust", "orpo", "simpo", "cpo", "kto"])
def test_preference(data, tokenizer, loss):
    settings = {"loss": loss, "beta": 0.5} | ({"label_smoothing": 0.1} if loss == "robust" else {})
    section = TaskSection.model_validate({"name": "preference", "preference": settings})
    padded, free = both(section, data, tokenizer)
    reference = llama(tokenizer)
    rows = PAIRS + JUDGED[:3] if loss == "kto" else PAIRS
    known, again = encoded(padded, rows, reference), encoded(free, rows, reference)
    for one, other in zip(known, again, strict=True):
        if "reference" in one.arrays:
            assert one.arrays["reference"] == pytest.approx(other.arrays["reference"], rel=1e-5)
    assert_alike(padded, free, known, nudged(copy.deepcopy(reference), by=0.02))


@pytest.mark.parametrize("is_decoder", [True, False])
def test_reward(data, tokenizer, is_decoder):
    section = TaskSection.model_validate({"name": "reward", "reward": {"centering": 0.1}})
    padded, free = both(section, data, tokenizer)
    if is_decoder:
        model = llama(tokenizer, LlamaForSequenceClassification, **padded.head_values)
    else:
        model = small(AutoModelForSequenceClassification, "roberta", **padded.head_values)
        model.resize_token_embeddings(len(tokenizer))
    assert_alike(padded, free, encoded(padded, PAIRS), model)


@pytest.mark.parametrize("is_cached", [False, True])
def test_distillation(data, tokenizer, is_cached):
    section = DistillationSection(teacher="x", top_k=5 if is_cached else None, cache=is_cached)
    tasks = both(TaskSection(name="distillation", distillation=section), data, tokenizer)
    student, teacher = llama(tokenizer), nudged(llama(tokenizer), by=0.1)
    rows = [{"messages": row["prompt"] + row["chosen"]} for row in PAIRS]
    if is_cached:
        samples = [encoded(task, rows, teacher) for task in tasks]
        for one, other in zip(*samples, strict=True):
            assert one.arrays["teacher_tokens"].tolist() == other.arrays["teacher_tokens"].tolist()
        assert_alike(*tasks, samples[0], student)
    else:
        padded, free = (task.attach_teacher(teacher) for task in tasks)
        assert_alike(padded, free, samples_of(padded, rows), student)


def test_halves_of_a_row_are_rows(data, tokenizer):
    section = TaskSection.model_validate({"name": "preference", "preference": {"loss": "orpo"}})
    _, free = both(section, data, tokenizer)
    model = llama(tokenizer)
    batch = free.collate(encoded(free, PAIRS))
    halves = (select_half(batch, lower=False), select_half(batch, lower=True))
    with torch.no_grad():
        whole = sequence_log_probabilities(model, batch)
        parts = torch.cat([sequence_log_probabilities(model, half) for half in halves])
    assert torch.allclose(whole, parts, atol=1e-5)
    assert sum((half.lengths for half in halves), ()) == batch.lengths
    assert np.concatenate([half.labels[0] for half in halves]).tolist() == batch.labels[0].tolist()
    assert [half.longest for half in halves] == [max(half.lengths) for half in halves]
