"""Text classification: batches, labels, what is measured on however many ranks, and decoders as classifiers."""

import copy
import json

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from finetune.config.sections.data import AuditSection, DataSection, TrainingSourceSection
from finetune.config.sections.task import ClassificationSection, TaskSection
from finetune.data.batch import IGNORED
from finetune.data.features import Features
from finetune.data.sources.source import open_source, rows_read
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.errors import DataError
from finetune.task.protocol import TaskContext, build_task
from tests.data.encoding.word_pieces import bert_tokenizer
from tests.refusals import refused
from tests.small_models import TINY

SIZES = {**TINY, "intermediate_size": 16}
LABELS = {"single_label": ["x", "y", "x", "z", "y"], "multi_label": [["x"], [], ["x", "y"], ["z"], ["y"]]}
LABELS["regression"] = [0.5, -100.0, 2.0, 1.0, 0.0]
TEXTS = ["a", "b c d", "playing", "a b", "new york !"]


def task_section(kind, **section):
    return TaskSection(name="text_classification", classification=ClassificationSection(kind=kind, **section))


def task_of(kind, tokenizer, data, *, found=None, **section):
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, found or LABELS[kind], strict=True)]
    task = build_task(TaskContext(task_section(kind, **section), data, tokenizer, rows=lambda: rows))
    samples = [Features(each.arrays, sample_id=number) for number, each in enumerate(task.encode(rows))]
    return task, samples


def bert(num_labels):
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(**SIZES, vocab_size=14, num_labels=num_labels, initializer_range=0.5)
    ).eval()


def test_texts_are_padded_with_their_types_and_labels(data):
    task, samples = task_of("single_label", bert_tokenizer(), data)
    batch = task.collate(samples[:2])
    assert batch.inputs["input_ids"].tolist() == [[2, 4, 3, 0, 0], [2, 5, 6, 7, 3]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert batch.inputs["token_type_ids"].shape == (2, 5)
    assert batch.labels.tolist() == [0, 1]
    assert (batch.num_targets, batch.num_tokens, batch.sample_ids) == (2, 8, (0, 1))


MEASURED = {
    "single_label": ["loss", "accuracy", "macro_f1", "micro_f1", "mcc"],
    "multi_label": ["loss", "subset_accuracy", "macro_f1", "micro_f1"],
    "regression": ["loss", "mse", "pearson", "spearman"],
}


@pytest.mark.parametrize("kind", MEASURED)
def test_metrics_of_uneven_ranks_equal_those_of_one(data, kind):
    task, samples = task_of(kind, bert_tokenizer(), data)
    model = bert(task.head_values["num_labels"])
    with torch.no_grad():
        whole = task.evaluate_batch(model, task.collate(samples))
        shares = [samples[:3], samples[3:4], samples[4:]]  # three ranks; two of them have a filler, too
        batches = [*map(task.collate, shares), task.dummy_batch(samples[0]), task.dummy_batch(samples[3])]
        parts = [task.evaluate_batch(model, batch) for batch in batches]
    sums = {name: sum(float(part.sums[name]) for part in parts) for name in whole.sums}
    records = torch.cat([part.records for part in parts if part.records is not None])
    apart = task.metrics(sums, records)
    assert list(apart) == MEASURED[kind]
    assert apart == pytest.approx(
        task.metrics({name: float(value) for name, value in whole.sums.items()}, whole.records), rel=1e-5, nan_ok=True
    )
    assert records[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", MEASURED)
def test_the_loss_is_that_of_transformers(data, kind):
    task, samples = task_of(kind, bert_tokenizer(), data)
    values = task.head_values
    model = bert(values["num_labels"])
    model.config.problem_type = values["problem_type"]
    batch = task.collate(samples)
    labels = batch.labels[:, 0] if kind == "regression" else batch.labels
    theirs = model(**batch.inputs, labels=labels).loss
    assert task.loss_sums(model, batch)["loss_sum"].item() / 5 == pytest.approx(theirs.item(), rel=1e-5)


def test_a_number_that_looks_ignored_counts(data):
    task, samples = task_of("regression", bert_tokenizer(), data)
    assert task.collate(samples[1:2]).labels.tolist() == [[IGNORED]]
    assert task.loss_sums(bert(1), task.collate(samples[1:2]))["loss_sum"] > 9000
    assert task.loss_sums(bert(1), task.dummy_batch(samples[1]))["loss_sum"] == 0.0


DECODERS = {
    "llama": (
        LlamaForSequenceClassification,
        LlamaConfig(**SIZES, vocab_size=320, num_key_value_heads=2, initializer_range=0.5),
    ),
    "gpt2": (
        GPT2ForSequenceClassification,
        GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=64, initializer_range=0.5),
    ),
}


@pytest.fixture
def tokenizer(tokenizer):
    return copy.deepcopy(tokenizer)  # the task gives it a padding token


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_answers_from_the_last_token_of_each_text_alone_as_in_a_batch(tokenizer, data, name):
    """The tokenizer has no padding token but end-of-sequence, and one text ends with that very token."""
    kind, config = DECODERS[name]
    torch.manual_seed(1)
    task, samples = task_of("single_label", tokenizer, data)
    for key, value in task.head_values.items():
        setattr(config, key, value)
    model = kind(config).eval()
    batch = task.collate(samples)
    with torch.no_grad():
        hidden = model.base_model(**batch.inputs).last_hidden_state
        last = [each.length - 1 for each in samples]
        formula = model.score(hidden[torch.arange(5), last])
        together = model(**batch.inputs).logits
        alone = torch.cat([model(**task.collate([each]).inputs).logits for each in samples])
    assert len(set(last)) > 1  # texts of several lengths
    torch.testing.assert_close(together, formula)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert tokenizer.pad_token_id == config.pad_token_id == tokenizer.eos_token_id  # what is exported pads alike


def test_a_text_that_ends_with_the_padding_token_is_answered_alike_in_a_batch(tokenizer, data):
    kind, config = DECODERS["llama"]
    torch.manual_seed(1)
    data = data.model_copy(update={"allow_special_tokens": True})
    task, _ = task_of("single_label", tokenizer, data)
    config.pad_token_id, config.num_labels = task.head_values["pad_token_id"], 3
    model = kind(config).eval()
    rows = [{"text": "What<|endoftext|>", "label": "x"}, {"text": "What is two and two?", "label": "y"}]
    first, second = task.encode(rows)
    with torch.no_grad():
        together = model(**task.collate([first, second]).inputs).logits[0]
        alone = model(**task.collate([first]).inputs).logits[0]
    assert first.arrays["input_ids"][-1] == config.pad_token_id
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_truncated_texts_are_counted_and_keep_their_special_tokens(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a b c d", "label": 1}\n{"text": "a", "label": 0}\n')
    section = DataSection(
        train=TrainingSourceSection(path=str(source)),
        max_length=4,
        over_length="truncate",
        cache_folder=str(tmp_path / "cache"),
    )
    rows = [{"text": "a", "label": 1}, {"text": "a", "label": 0}]
    task = build_task(
        TaskContext(TaskSection(name="text_classification"), section, bert_tokenizer(), rows=lambda: rows)
    )
    opened = open_source(section.train, key="data.train", log=lambda _: None)
    prepared = prepare_set(opened, Encoding(task.samples.encode, section, identity={}), log=lambda _: None)
    counts = prepared.counts
    assert prepared[0].arrays["input_ids"].tolist() == [2, 4, 5, 3]
    assert (counts.truncated_rows, counts.truncated_tokens, counts.truncated_targets, counts.longest) == (1, 2, 0, 6)
    assert (counts.samples, counts.tokens, counts.targets) == (2, 7, 2)


def test_regression_rows_without_a_numeric_label_are_rejected(data):
    with refused(DataError, "`x`"):
        task_of("regression", bert_tokenizer(), data, found=list("xyxzy"))


def test_unlabeled_rows_are_left_out_and_counted_and_none_is_no_target_of_the_audit(tmp_path, data):
    rows = [
        {"text": "a", "label": 0},
        {"text": "b", "label": -1},
        {"text": "c", "label": 1},
        {"text": "d", "label": None},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = DataSection(
        train=TrainingSourceSection(path=str(path)), max_length=8, cache_folder=str(tmp_path / "cache")
    )
    source = open_source(section.train, key="data.train", log=lambda _: None)
    task = build_task(
        TaskContext(
            TaskSection(name="text_classification"), section, bert_tokenizer(), rows=lambda: rows_read([source])
        )
    )
    said = []
    prepared = prepare_set(source, Encoding(task.samples.encode, section, identity={}), log=said.append)
    assert [sample.arrays["labels"].tolist() for sample in prepared] == [[0], [1]]
    assert (prepared.counts.unlabeled_rows, prepared.counts.rows_without_target) == (2, 0)
    assert "data.train: left out without a label: 2 rows" in said
    with refused(DataError, "data.train: 2 of 4 rows"):
        strict = section.model_copy(update={"audit": AuditSection(max_dropped_rows=0.0)})
        prepare_set(source, Encoding(task.samples.encode, strict, identity={}), log=said.append)


def test_vectors_of_classes_are_evaluated_with_the_classes_of_the_training_rows(data):
    found = [[1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 1], [1, 1, 1]]
    task, samples = task_of("multi_label", bert_tokenizer(), data, found=found)
    assert task.head_values["num_labels"] == 3
    assert [sample.arrays["labels"].tolist() for sample in samples] == found
    assert [task.label_text(sample) for sample in samples[:3]] == ["0, 2", "1", "none"]
    again = build_task(TaskContext(task_section("multi_label"), data, bert_tokenizer(), facts=task.data_facts.values))
    assert again.encode_row({"text": "a", "label": [0, 1, 1]}).arrays["labels"].tolist() == [0, 1, 1]
    with refused(DataError, "2 numbers", "3 classes"):
        again.encode_row({"text": "a", "label": [0, 1]})
