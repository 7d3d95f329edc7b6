"""Whether samples share rows is decided by the job and the model's config, before there is a model."""

import json

import pytest
from transformers import AutoConfig

from finetune.checkpoint.format.manifest import Manifest, RunFingerprint, write_manifest
from finetune.config.load import load_config
from finetune.run.setup.model_problems import format_padding_free, recorded_layout, resolve_padding_free

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
        (("model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4}}",), False),
        ((f"model.from_config={LINEAR}",), True),
        (("model.from_config.model_type=gpt_oss",), True),
        (("model.from_config.model_type=gpt_oss", "model.attention=flash_attention_3"), False),
        (("model.attention=flash_attention_2",), True),
        (("model.from_config.model_type=jamba",), False),
        (("task.name=preference",), True),
        (("task.name=reward",), True),
        ((f"model.from_config={BERT}", "task.name=masked_lm"), True),
        ((f"model.from_config={BERT}", "task.name=masked_lm", "model.attention=flash_attention_2"), True),
        ((f"model.from_config={BERT}", "task.name=text_classification"), True),
        ((f"model.from_config={BERT}", "task.name=token_classification", "model.attention=sdpa"), False),
        (("model.from_config={model_type: mpnet}", "task.name=masked_lm"), False),
        (("task.name=seq2seq",), False),
        (("task={name: distillation, distillation: {teacher: ./absent}}",), False),
    ],
)
def test_samples_are_packed_if_the_model_is_known_to_isolate_them(job, overrides, is_free):
    config, data = job(*overrides)
    assert data.batching.padding_free is is_free
    assert data.model_copy(update={"batching": config.data.batching}) == config.data
    assert data.batching.length_window_steps == (1 if data.batching.by == "samples" and not is_free else 0)


@pytest.mark.parametrize(("kind", "is_free"), [("LORA", True), ("PROMPT_TUNING", False)])
def test_the_type_of_a_saved_adapter_decides_whether_samples_are_packed(job, tmp_path, kind, is_free):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    assert job("model.adapter=./adapter")[1].batching.padding_free is is_free


def test_the_start_logs_the_automatic_batching(job):
    assert format_padding_free(*job()) == ("padding-free batches: the model keeps the samples of a row apart",)
    (line,) = format_padding_free(*job("model.attention=sdpa"))
    assert line.startswith("samples are padded, and sorted by length within each step: ")
    assert format_padding_free(*job("data.batching.padding_free=true")) == ()
    assert format_padding_free(*job("data.batching={by: packs, tokens: 64}", "train.microbatch_size=1")) == ()
    assert format_padding_free(*job("task.name=seq2seq")) == ()


def test_an_explicit_length_window_is_kept_and_data_without_lengths_is_not_sorted(job):
    assert job("data.batching.length_window_steps=4")[1].batching.length_window_steps == 4
    assert job("data.batching={padding_free: false, length_window_steps: 0}")[1].batching.length_window_steps == 0
    assert job(*IMAGES)[1].batching.length_window_steps == 0


@pytest.mark.parametrize(("kind", "is_free"), [("llama", True), ("mamba2", True), ("jamba", False)])
def test_samples_are_packed_only_if_the_teacher_isolates_them_too(job, tmp_path, kind, is_free):
    AutoConfig.for_model(kind).save_pretrained(tmp_path / "teacher")
    teacher = f"{{name: distillation, distillation: {{teacher: {tmp_path / 'teacher'}}}}}"
    assert job(f"task={teacher}")[1].batching.padding_free is is_free


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("model.attention=eager",), "`model.attention: eager` needs a mask of the whole row. Write `auto`"),
        (
            ("model.peft={type: prompt_tuning, values: {num_virtual_tokens: 4}}",),
            "samples in one row would share what the adapter prepends",
        ),
        (("model.from_config.model_type=jamba",), "`jamba`: its scan (Mamba 1) does not get the boundaries of samples"),
        (
            ("model.from_config.model_type=gpt_oss", "model.attention=flash_attention_3"),
            "`model.attention: flash_attention_3` does not keep samples of this model apart. Write `auto`",
        ),
    ],
)
def test_the_start_logs_why_samples_are_padded(job, overrides, reason):
    (line,) = format_padding_free(*job(*overrides))
    assert line.startswith(f"samples are padded, and sorted by length within each step: {reason}")


def checkpoint(folder, origin):
    """Write the manifest of a checkpoint of a run with this origin."""
    path = folder / "runs" / "job" / "checkpoints" / "step-000004"
    path.mkdir(parents=True)
    origin = {"strategy": "ddp", "processes": "1", **origin}
    write_manifest(path, Manifest(4, RunFingerprint({}, {}, origin), {}, "", 0.0, {}, {}))
    return path


@pytest.mark.parametrize(
    ("kind", "recorded", "overrides", "is_free"),
    [
        ("qwen3_next", None, (), False),
        ("qwen3_next", "padding-free", (), True),
        ("qwen3_next", None, ("data.batching.padding_free=true",), True),
        ("qwen3_next", None, ("checkpoint.resume=never",), True),
        ("llama", None, (), True),
    ],
)
def test_a_resumed_run_lays_its_samples_out_as_before(job, tmp_path, kind, recorded, overrides, is_free):
    checkpoint(tmp_path, {} if recorded is None else {"batches": recorded})
    config, data = job(f"model.from_config={{model_type: {kind}}}", *overrides)
    assert data.batching.padding_free is is_free
    if not is_free:
        (line,) = format_padding_free(config, data)
        assert "step: the checkpoint that the run resumes from is of a run that padded them" in line
        assert recorded_layout(config) == {}


def test_the_checkpoint_that_is_named_decides(job, tmp_path):
    path = checkpoint(tmp_path, {})
    moved = path.rename(tmp_path / "step-000004")
    assert job(f"model.from_config={LINEAR}")[1].batching.padding_free is True
    assert job(f"model.from_config={LINEAR}", f"checkpoint.resume={moved}")[1].batching.padding_free is False


def test_checkpoints_record_the_layout_where_older_versions_have_another(job):
    assert recorded_layout(job(f"model.from_config={LINEAR}")[0]) == {"batches": "padding-free"}
    assert recorded_layout(job()[0]) == {}
    assert recorded_layout(job("task.name=preference")[0]) == {"batches": "padding-free"}
    assert recorded_layout(job(f"model.from_config={LINEAR}", "data.batching.padding_free=true")[0]) != {}
    assert recorded_layout(job(f"model.from_config={LINEAR}", "data.batching.padding_free=false")[0]) == {}


def test_a_folder_without_a_model_disables_packing_without_an_error(job, tmp_path):
    (tmp_path / "empty").mkdir()
    config, data = job("model={from_config: null, name: ./empty, tokenizer: {name: someones/tokenizer}}")
    assert config.model.name.endswith("empty")
    assert data.batching.padding_free is False
