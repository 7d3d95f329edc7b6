"""Collation and the tasks on top of it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.config.sections.task import TaskSection
from finetune.data.batch import IGNORED
from finetune.data.encoding.tokenizer import tokenizer_identity
from finetune.data.features import Features
from finetune.data.sources.source import open_source
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.token_cache.cache import prepare_set
from finetune.data.token_cache.chunks import Encoding
from finetune.errors import DataError
from finetune.task.causal_lm import PretrainTask, SftTask
from finetune.task.protocol import TaskContext, build_task
from tests.refusals import pinned, refused
from tests.small_models import byte_tokenizer

GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"


def features(ids, targets, sample_id=0):
    is_target = np.array([place in targets for place in range(len(ids))])
    return Features({"input_ids": np.array(ids, np.uint32), "is_target": is_target}, sample_id)


def conversation(*contents):
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]}


@pytest.fixture
def sft(tokenizer, data):
    return build_task(TaskContext(TaskSection(name="sft"), data, tokenizer))


@pytest.fixture
def pretrain(tokenizer, data):
    return build_task(TaskContext(TaskSection(name="pretrain"), data, tokenizer))


def test_samples_are_padded_on_the_right_and_labels_stand_one_place_earlier(sft):
    batch = sft.collate([features([5, 6, 7, 8], {2, 3}, 4), features([9, 10], {1}, 2)])
    pad = sft.pad_id
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7, 8], [9, 10, pad, pad]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.labels.tolist() == [[IGNORED, 7, 8, IGNORED], [10, IGNORED, IGNORED, IGNORED]]
    assert (batch.num_targets, batch.num_tokens, batch.sample_ids) == (3, 6, (4, 2))
    assert batch.inputs["input_ids"].dtype == torch.int64
    assert batch.num_targets == 3


class LastTargetOfRow(PretrainTask):
    def encode_row(self, row):
        return only_last_target(super().encode_row(row))


class LastTargetOfRows(PretrainTask):
    def encode(self, rows):
        return [only_last_target(each) for each in super().encode(rows)]


def only_last_target(encoded):
    is_target = np.zeros(encoded.length, bool)
    is_target[-1] = True
    return replace(encoded, arrays={**encoded.arrays, "is_target": is_target})


@pytest.mark.parametrize("kind", [LastTargetOfRow, LastTargetOfRows])
def test_a_task_that_changes_the_encoding_of_its_base_class_is_asked_for_every_row(kind, tokenizer, data):
    task = kind(TaskContext(TaskSection(name="pretrain"), data, tokenizer))
    row = {"text": "Two and two is four."}
    for encoded in (*task.samples.encode([row, row]), *task.encode([row]), task.encode_row(row)):
        assert encoded.arrays["is_target"].sum() == 1


def test_a_filler_has_the_shape_of_a_sample_and_nothing_that_counts(sft):
    batch = sft.dummy_batch(features([5, 6, 7], {1, 2}))
    assert batch.inputs["input_ids"].tolist() == [[5, 6, 7]]
    assert (batch.num_targets, batch.num_tokens, batch.sample_ids) == (0, 0, ())
    assert batch.labels.tolist() == [[IGNORED] * 3]


def test_padding_does_not_change_the_loss(sft, model):
    samples = [features(range(10, 10 + n), set(range(2, n))) for n in (3, 9, 5, 7)]
    together = sft.loss_sums(model, sft.collate(samples))["loss_sum"]
    alone = sum(sft.loss_sums(model, sft.collate([each]))["loss_sum"] for each in samples)
    assert together.item() == pytest.approx(alone.item(), rel=1e-5)


def test_the_loss_is_that_of_transformers(sft, model):
    ids = list(range(20, 40))
    batch = sft.collate([features(ids, set(range(8, 20)))])
    labels = torch.tensor([[IGNORED] * 8 + ids[8:]])
    theirs = model(input_ids=torch.tensor([ids]), labels=labels).loss
    assert sft.loss_sums(model, batch)["loss_sum"].item() / 12 == pytest.approx(theirs.item(), rel=1e-5)


def test_a_prompt_is_everything_before_the_last_answer(sft, tokenizer):
    encoded = sft.encode_row(conversation("What is two?", "Two.", "And four?", "Two and two is four."))
    prompt = sft.prompt(encoded)
    asked = tokenizer.decode(prompt.input_ids)
    assert asked.endswith("Two.<|im_end|>\n<|im_start|>user\nAnd four?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(prompt.reference_ids) == "Two and two is four.<|im_end|>"


def test_the_system_prompt_leads_the_conversation(tokenizer, data):
    section = data.model_copy(update={"system_prompt": "Be brief."})
    task = SftTask(TaskContext(TaskSection(name="sft"), section, tokenizer))
    ids = task.encode_row(conversation("What?", "Two."))
    assert tokenizer.decode(ids.arrays["input_ids"].tolist()).startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_pre_training_text_is_all_targets_and_has_no_prompt(pretrain):
    encoded = pretrain.encode_row({"text": "Two and two is four."})
    assert encoded.num_targets == encoded.length - 1
    assert pretrain.prompt(encoded) is None


def test_sft_without_a_chat_template_is_refused_at_once(tokenizer, data, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with refused(DataError):
        build_task(TaskContext(TaskSection(name="sft"), data, tokenizer))
    assert isinstance(build_task(TaskContext(TaskSection(name="pretrain"), data, tokenizer)), PretrainTask)


def test_the_end_of_turn_stays_a_target_where_it_is_the_padding_token_too(data):
    """SmolLM2's tokenizer has one token for both."""
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    tokenizer = byte_tokenizer(special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"], **marks)
    set_chat_template(tokenizer, "chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    task = build_task(TaskContext(TaskSection(name="sft"), data, tokenizer))
    short, long = task.samples.encode([conversation("a", "b"), conversation("a", "b", "c", "a long answer")])
    assert task.pad_id == end and long.length > short.length
    batch = task.collate([short, long])
    assert (batch.labels == end).sum(dim=1).tolist() == [1, 2]  # an end of turn per answer
    padding = batch.inputs["input_ids"][0, short.length :]
    assert padding.tolist() == [end] * (long.length - short.length)
    assert batch.labels[0, short.length - 1 :].unique().tolist() == [IGNORED]
    answers = ("b", "b", "a long answer")
    assert batch.num_targets == sum(len(tokenizer(answer)["input_ids"]) + 1 for answer in answers)


UNFIT = [
    (SftTask, {"text": "a"}, "`pretrain`"),
    (SftTask, {"text": "a", "label": 1}, "`format: pro"),
    (SftTask, {"prompt": [], "chosen": [], "rejected": []}, "`format: "),
    (PretrainTask, {"messages": []}, "`sft`"),
    (PretrainTask, {"text": "a", "label": 1}, "`sft`"),
]


@pytest.mark.parametrize(("task", "row", "fact"), UNFIT)
def test_a_row_that_does_not_fit_the_task_is_rejected_with_the_format_to_write(tokenizer, task, row, fact):
    section = DataSection(train=TrainingSourceSection(path="rows.jsonl"), max_length=64)
    (outcome,) = task(TaskContext(TaskSection(name="sft"), section, tokenizer)).encode([row])
    assert isinstance(outcome, DataError)
    pinned(outcome, fact)


def test_gsm8k_rows_have_their_answers_as_targets(tokenizer, tmp_path):
    if not GSM8K.is_file():
        pytest.skip(f"{GSM8K} is not here")
    source = TrainingSourceSection(path=str(GSM8K), columns={"prompt": "question", "completion": "answer"}, take=40)
    section = DataSection(train=source, max_length=2048, cache_folder=str(tmp_path))
    task = SftTask(TaskContext(TaskSection(name="sft"), section, tokenizer))
    said = []
    identity = tokenizer_identity(tokenizer)
    opened = open_source(source, key="data.train", log=said.append)
    prepared = prepare_set(opened, Encoding(task.encode, section, identity=identity), log=said.append)
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:40]]
    assert len(prepared) == 40
    for row, sample in zip(rows, prepared, strict=True):
        prompt = task.prompt(sample)
        assert tokenizer.decode(prompt.reference_ids) == row["answer"] + "<|im_end|>"
        assert (
            tokenizer.decode(prompt.input_ids)
            == f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert sample.num_targets == len(prompt.reference_ids)
    assert prepared.counts.targets == prepared.num_targets_each.sum() > 0
    assert "data.train: 40 rows -> 40 samples" in said
