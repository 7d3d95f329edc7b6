"""Token classification: words with classes, their entities, and long sentences."""

import pytest
import torch
from transformers import BertConfig, BertForTokenClassification

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import IGNORED
from finetune.data.features import Features
from finetune.data.sources.source import open_source
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.task.protocol import TaskContext, build_task
from tests.data.encoding.word_pieces import WORDS, bert_tokenizer
from tests.small_models import TINY

ROWS = [
    {"tokens": ["playing", "New", "York"], "tags": ["O", "B-LOC", "I-LOC"]},
    {"tokens": ["a", "!"], "tags": ["O", "O"]},
    {"tokens": ["York"], "tags": ["B-LOC"]},
    {"tokens": ["a", "b", "c", "plays"], "tags": ["O", "O", "B-LOC", "O"]},
]


def task_of(data, rows=ROWS):
    return build_task(TaskContext(TaskSection(name="token_classification"), data, bert_tokenizer(), rows=lambda: rows))


@pytest.fixture
def task(data):
    return task_of(data)


@pytest.fixture
def samples(task):
    return [Features(each.arrays, sample_id=number) for number, each in enumerate(task.encode(ROWS))]


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = BertConfig(**{**TINY, "intermediate_size": 16}, vocab_size=14, num_labels=3, initializer_range=1.0)
    return BertForTokenClassification(config).eval()


def test_first_tokens_carry_the_tags_and_all_else_is_ignored(task, samples):
    batch = task.collate(samples[:2])
    assert task.classification.classes.names == ("B-LOC", "I-LOC", "O")
    assert batch.labels.tolist() == [[IGNORED, 2, IGNORED, 0, 1, IGNORED], [IGNORED, 2, 2] + [IGNORED] * 3]
    assert (batch.num_targets, batch.num_tokens) == (5, 10)
    assert task.dummy_batch(samples[0]).num_targets == 0


def test_the_loss_is_that_of_transformers(task, samples, model):
    batch = task.collate(samples)
    theirs = model(**batch.inputs, labels=batch.labels).loss
    assert task.loss_sums(model, batch)["loss_sum"].item() / batch.num_targets == pytest.approx(theirs.item(), rel=1e-5)


def test_metrics_of_uneven_ranks_equal_those_of_one(task, samples, model):
    with torch.no_grad():
        whole = task.evaluate_batch(model, task.collate(samples))
        batches = [task.collate(samples[:2]), task.collate(samples[2:3]), task.collate(samples[3:])]
        parts = [task.evaluate_batch(model, batch) for batch in (*batches, task.dummy_batch(samples[2]))]
    records = torch.cat([part.records for part in parts if part.records is not None])
    sums = {name: sum(float(part.sums[name]) for part in parts) for name in whole.sums}
    apart = task.metrics(sums, records)
    assert list(apart) == ["loss", "accuracy", "macro_f1", "entity_f1", "entity_precision", "entity_recall"]
    together = task.metrics({name: float(value) for name, value in whole.sums.items()}, whole.records)
    assert apart == pytest.approx(together, rel=1e-5)
    assert len(records) == 10


def test_tags_without_entities_have_no_entity_metrics(data):
    task = task_of(data, [{"tokens": ["a", "b"], "tags": ["NOUN", "VERB"]}])
    metrics = task.metrics({"loss_sum": 1.0, "num_targets": 2.0}, torch.tensor([[0, 0, 0], [0, 1, 0]]).double())
    assert metrics["accuracy"] == 0.5
    assert list(metrics) == ["loss", "accuracy", "macro_f1"]


@pytest.mark.parametrize(
    ("over_length", "left", "lost"),
    [
        ("truncate", ["[CLS] a b [SEP]"], {"truncated_rows": 1, "truncated_tokens": 3, "truncated_targets": 2}),
        ("split", ["[CLS] a b [SEP]", "[CLS] c play [SEP]"], {"split_rows": 1, "dropped_tokens": 1}),
    ],
)
def test_long_sentences_keep_the_tokens_around_them(tmp_path, over_length, left, lost):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"tokens": ["a", "b", "c", "plays"], "tags": ["O", "O", "B-LOC", "O"]}\n')
    section = DataSection(
        train=TrainingSourceSection(path=str(source)),
        max_length=4,
        over_length=over_length,
        cache_folder=str(tmp_path / "cache"),
    )
    task = task_of(section)
    opened = open_source(section.train, key="data.train", log=lambda _: None)
    prepared = prepare_set(
        opened,
        Encoding(task.samples.encode, section, identity={}, length=task.samples.length_limit),
        log=lambda _: None,
    )
    assert [" ".join(WORDS[i] for i in each.arrays["input_ids"]) for each in prepared] == left
    assert {name: getattr(prepared.counts, name) for name in lost} == lost


@pytest.mark.parametrize("none", [-100, -1, None])
def test_words_without_a_tag_are_in_no_class_no_loss_and_no_metric(data, model, none):
    rows = [{"tokens": ["playing", "a", "York"], "tags": [1, none, 0]}, {"tokens": ["a", "b"], "tags": [2, none]}]
    task = task_of(data, rows)
    assert task.classification.classes.names == ("0", "1", "2")
    samples = [Features(each.arrays, sample_id=number) for number, each in enumerate(task.encode(rows))]
    batch = task.collate(samples)
    assert batch.num_targets == 3
    output = task.evaluate_batch(model, batch)
    assert (output.sums["num_targets"].item(), output.records[:, 1].tolist()) == (3, [1, 0, 2])
