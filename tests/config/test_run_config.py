from contextlib import nullcontext

import pytest

from finetune.config.explain import format_summary
from finetune.config.load import require_divisible_batch
from finetune.errors import ConfigError
from tests.refusals import refused


def test_a_batch_that_the_processes_cannot_share_names_the_nearest_that_they_can(load, job):
    loaded = load("train.steps=10", text=job.read_text().replace("batch_size: 8", "batch_size: 28"))
    with refused(ConfigError, "line 12, train.global_batch_size: 28 ", "4 processes x 4 per microbatch", "16, 32"):
        require_divisible_batch(loaded, num_processes=4)


@pytest.mark.parametrize(("processes", "fits"), [(1, True), (2, True), (3, False), (4, False)])
def test_a_batch_of_8_in_microbatches_of_4_fits_one_or_two_processes(load, processes, fits):
    with nullcontext() if fits else refused(ConfigError, "train.global_batch_size: 8"):
        require_divisible_batch(load(), num_processes=processes)


def test_an_override_is_blamed_where_it_wrote_the_batch(load):
    with refused(ConfigError, "--set train.global_batch_size=12, "):
        require_divisible_batch(load("train.global_batch_size=12"), num_processes=2)


def test_a_config_is_frozen(load):
    config = load().config
    with pytest.raises(ValueError, match="frozen"):
        config.train.steps = 3


def test_the_summary_does_the_arithmetic_of_the_batch(load):
    config = load("train.global_batch_size=16").config
    assert format_summary(config, num_processes=2)[2] == (
        "batch    16 per step = 2 processes x 4 per microbatch x 2 accumulated"
    )
    assert (
        format_summary(config, num_processes=None)[2]
        == "batch    16 per step = 4 per microbatch x 4; fits on 1, 2, 4 processes"
    )


def test_the_summary_lists_model_budget_and_rows(load, tmp_path):
    lines = format_summary(load("model.lora.rank=8", "train.steps=null", "train.epochs=2").config, num_processes=1)
    assert lines[0] == f"task     sft, from {tmp_path}/rows.jsonl"
    assert lines[1] == "model    gpt2: LoRA of rank 8 on float32 weights, computed in fp32"
    assert lines[3] == "budget   2 epochs, learning rate 0.0001, cosine"


LORA, BF16 = "model.lora={rank: 2}", "train.precision=bf16"


@pytest.mark.parametrize(
    ("overrides", "dtype"),
    [
        ((LORA, BF16), "bfloat16"),
        ((LORA, BF16, "model.dtype=auto"), "bfloat16"),
        ((LORA, BF16, "model.dtype=float32"), "float32"),
        ((LORA,), "float32"),
        ((BF16,), "float32"),
        (("model.lora={rank: 2, init: pissa}", BF16), "float32"),
        (("model.lora={rank: 2, modules_to_save: [lm_head]}", BF16), "float32"),
        (("model.lora={rank: 2, dora: true}", BF16), "float32"),
    ],
)
def test_frozen_weights_under_lora_are_in_the_dtype_of_the_products_unless_float32_is_written(load, overrides, dtype):
    assert load(*overrides).config.model.dtype == dtype
