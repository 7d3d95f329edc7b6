"""Whether samples share rows is decided by the job and the model's config, before there is a model."""

import json

import pytest
from transformers import AutoConfig

from finetune.config.load import load_config
from finetune.run.build.padding_free import format_padding_free, resolve_padding_free

JOB = """
run: {folder: runs/job}
model:
  from_config: {model_type: llama, values: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}
  tokenizer: {name: someones/tokenizer}
data:
  train: {path: train.jsonl}
  max_length: 64
task: {name: sft}
train: {global_batch_size: 8, microbatch_size: 4, steps: 8, learning_rate: 1e-3}
"""
LINEAR = "{model_type: qwen3_next, values: {layer_types: [linear_attention, full_attention], num_hidden_layers: 2}}"


IMAGES = ("task.name=image_classification", "data.max_length=null", "model={from_config: {model_type: resnet}}")
BERT = "{model_type: bert, values: {hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}}"


@pytest.fixture
def job(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "job.yaml").write_text(JOB)

    def settle(*overrides):
        config = load_config(tmp_path / "job.yaml", list(overrides)).config
        return config, resolve_padding_free(config)

    return settle


@pytest.mark.parametrize(
    ("overrides", "is_free"),
    [
        ((), True),
        (("data.batching={by: tokens, tokens: 128}", "train.microbatch_size=1"), True),
        (("task.name=pretrain",), True),
        (("model.lora={rank: 4, alpha: 8}",), True),
        (("data.batching.padding_free=false",), False),
        (("data.batching.padding_free=true", "model.attention=sdpa"), True),
        (("model.attention=sdpa",), False),
        (("model.attention=eager",), False),
        (("model.prompt_tuning={num_tokens: 4}",), False),
        ((f"model.from_config={LINEAR}",), False),
        (("task.name=preference",), True),
        (("task.name=reward",), True),
        ((f"model.from_config={BERT}", "task.name=masked_lm"), True),
        ((f"model.from_config={BERT}", "task.name=text_classification"), True),
        ((f"model.from_config={BERT}", "task.name=token_classification", "model.attention=sdpa"), False),
        (("model.from_config={model_type: mpnet}", "task.name=masked_lm"), False),
        (("task.name=seq2seq",), False),
        (("task={name: distillation, distillation: {teacher: ./absent}}",), False),
    ],
)
def test_samples_share_rows_where_the_model_is_known_to_keep_them_apart(job, overrides, is_free):
    config, data = job(*overrides)
    assert data.batching.padding_free is is_free
    assert data.model_copy(update={"batching": config.data.batching}) == config.data
    assert data.batching.length_window_steps == (1 if data.batching.by == "samples" and not is_free else 0)


@pytest.mark.parametrize(("kind", "is_free"), [("LORA", True), ("PROMPT_TUNING", False)])
def test_what_an_adapter_on_disk_is_decides(job, tmp_path, kind, is_free):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    assert job("model.adapter=./adapter")[1].batching.padding_free is is_free


def test_a_start_says_what_auto_has_come_to(job):
    assert format_padding_free(*job()) == ("padding-free batches: the model keeps the samples of a row apart",)
    (line,) = format_padding_free(*job("model.attention=sdpa"))
    assert line.startswith("samples are padded, and sorted by length within each step: ")
    assert format_padding_free(*job("data.batching.padding_free=true")) == ()
    assert format_padding_free(*job("data.batching={by: packs, tokens: 64}", "train.microbatch_size=1")) == ()
    assert format_padding_free(*job("task.name=seq2seq")) == ()


def test_a_written_window_stays_and_what_has_no_lengths_is_not_sorted(job):
    assert job("data.batching.length_window_steps=4")[1].batching.length_window_steps == 4
    assert job("data.batching={padding_free: false, length_window_steps: 0}")[1].batching.length_window_steps == 0
    assert job(*IMAGES)[1].batching.length_window_steps == 0


@pytest.mark.parametrize(("kind", "is_free"), [("llama", True), ("mamba2", False)])
def test_a_teacher_must_keep_them_apart_too(job, tmp_path, kind, is_free):
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "teacher")
    teacher = f"{{name: distillation, distillation: {{teacher: {tmp_path / 'teacher'}}}}}"
    assert job(f"task={teacher}")[1].batching.padding_free is is_free


def test_a_folder_without_a_model_is_told_of_where_it_is_loaded(job, tmp_path):
    (tmp_path / "empty").mkdir()
    config, data = job("model={from_config: null, name: ./empty, tokenizer: {name: someones/tokenizer}}")
    assert config.model.name.endswith("empty")
    assert data.batching.padding_free is False
