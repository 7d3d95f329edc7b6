"""The job's own settings for a few steps: which are kept, which are replaced."""

import json
from pathlib import Path

import pytest

from finetune.commands.rehearse.job_changes import job_changes, match_targets, plan_schedule
from finetune.commands.rehearse.runs import error_in
from finetune.commands.rehearse.small_model import shrink_architecture
from finetune.config.load import load_config
from finetune.config.overrides import override_text
from finetune.config.sections.model import FromConfigSection, ModelSection


def changes_of(job, *overrides):
    config = load_config(job, overrides).config
    schedule = plan_schedule(config, steps=4, processes=2, real_processes=2)
    return {change.key: change for change in job_changes(config, schedule, folder=Path("/scratch"))}


def test_the_rehearsed_job_is_a_valid_job(job, tmp_path):
    overrides = (
        "train.schedule.warmup_steps=5",
        "train.average={}",
        "evaluate.every_steps=5",
        "data.validation.fraction=0.5",
        "checkpoint.every_steps=5",
        "train.early_stopping={}",
        "checkpoint.keep_best={}",
        "data.num_workers=4",
        "report.trackers=[tensorboard]",
    )
    changes = changes_of(job, *overrides)
    again = load_config(job, [*overrides, *(override_text(key, change.now) for key, change in changes.items())]).config
    assert (again.train.steps, again.train.schedule.warmup_steps, again.data.num_workers) == (4, 1, 1)
    assert again.checkpoint.every_steps == again.evaluate.every_steps == 2
    assert again.report.trackers == () and again.train.early_stopping.patience == 5


def test_products_in_8_bits_are_rehearsed_in_bf16(job):
    overrides = ("train.precision=fp8", "train.fp8={recipe: rowwise}")
    changes = changes_of(job, *overrides)
    assert changes["train.precision"].now == "bf16" and changes["train.fp8"].now is None
    load_config(job, [*overrides, *(override_text(key, change.now) for key, change in changes.items())])


def test_kernels_and_paged_moments_of_a_gpu_are_rehearsed_without(job):
    overrides = ("train.optimizer={name: paged_adamw, betas: [0.9, 0.98]}", "model.kernels=liger")
    changes = changes_of(job, *overrides)
    assert (changes["train.optimizer.name"].now, changes["model.kernels"].now) == ("adamw", "none")
    again = load_config(job, [*overrides, *(override_text(key, change.now) for key, change in changes.items())]).config
    assert tuple(again.train.optimizer.betas) == (0.9, 0.98)


def test_the_rehearsal_accumulates_if_the_job_does(job):
    config = load_config(job, ["train.global_batch_size=512"]).config
    with_it = plan_schedule(config, steps=5, processes=3, real_processes=16)
    without = plan_schedule(config, steps=5, processes=3, real_processes=128)
    assert (with_it.microbatch_size, with_it.global_batch_size, with_it.saved_at) == (2, 12, 3)
    assert without.global_batch_size == 6


def test_a_rank_is_small_enough_for_the_small_model(job):
    assert changes_of(job, "model.lora={rank: 128, init: pissa}")["model.lora.rank"].now == 8


def test_the_error_of_a_rank_is_read_without_the_launchers_lines():
    log = "warming up\n[rank 1] error: 2 problems\n  line 3\n  line 4\nW1123 Sending process 7 closing signal\n"
    assert error_in(log) == "2 problems\n  line 3\n  line 4"
    assert error_in("Traceback (most recent call last):\nValueError: bug\n") is None


LLAMA = {
    "hidden_size": 512,
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "vocab_size": 300,
    "intermediate_size": 1024,
}


@pytest.fixture(scope="module")
def architecture():
    section = ModelSection(from_config=FromConfigSection(model_type="llama", values=LLAMA))
    return shrink_architecture(section, head="causal_lm")


def matched(job, architecture, *overrides):
    """Return the new values of the keys that change."""
    sets = [
        "model.name=null",
        f'model.from_config={{"model_type": "llama", "values": {json.dumps(LLAMA)}}}',
        "model.tokenizer.train={}",
    ]
    config = load_config(job, [*sets, *overrides]).config
    return {change.key: change.now for change in match_targets(config, architecture)}


def test_patterns_that_select_no_layers_are_unchanged(job, architecture):
    assert matched(job, architecture, 'model.freeze=["model.embed_tokens.*", "*.mlp.*"]') == {}


@pytest.mark.parametrize(
    ("key", "pattern", "mapped"),
    [
        ("model.train_only", "model.layers.31.*", "model.layers.1.*"),
        ("model.freeze", "model.layers.20.self_attn.*", "model.layers.1.self_attn.*"),
        ("model.freeze", "*.layers.15.*", "*.layers.1.*"),
        ("model.train_only", "*.layers.3[01].*", "*.layers.*.*"),
    ],
)
def test_a_layer_that_the_small_model_lacks_is_replaced(job, architecture, key, pattern, mapped):
    assert matched(job, architecture, f'{key}=["{pattern}"]') == {key: [mapped]}


def test_layers_of_lora_are_mapped_to_the_small_model(job, architecture):
    assert matched(job, architecture, "model.lora.layers=[0, 1, 2]", "model.lora.rank=4") == {
        "model.lora.layers": [0, 1]
    }
    assert matched(job, architecture, f"model.lora.layers={list(range(16, 32))}") == {"model.lora.layers": [1]}


def test_a_target_module_of_one_layer_is_mapped(job, architecture):
    found = matched(job, architecture, 'model.lora.target_modules=["layers.31.self_attn.q_proj", "v_proj"]')
    assert found == {"model.lora.target_modules": ["layers.1.self_attn.q_proj", "v_proj"]}
