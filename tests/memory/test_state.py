"""Weights, gradients and optimizer state of a rank are counted."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from finetune.config.load import load_config
from finetune.memory.state import RankMemory, count_state, predict_memory
from finetune.model.size import ModelSize
from finetune.strategy.protocol import Sharded

BILLION = 10**9
SIZE = ModelSize(
    num_parameters=BILLION,
    num_trained=BILLION,
    num_adapted_modules=0,
    bytes_by_dtype={"float32": 4 * BILLION},
    trained_bytes_by_dtype={"float32": 4 * BILLION},
    largest_trained_bytes=1000,
)
ALL = (Sharded.PARAMETERS, Sharded.GRADIENTS, Sharded.OPTIMIZER)


def strategy_of(*sharded, name="fsdp2", num_shards=4):
    expected = SimpleNamespace(num_shards=num_shards, num_processes=num_shards, sequence_size=1, tensor_size=1)
    return SimpleNamespace(name=name, sharded=frozenset(sharded), expected=expected)


def counted(job, *sharded, overrides=(), name="fsdp2", **settings):
    config = load_config(job, overrides).config
    return count_state(config, strategy_of(*sharded, name=name), size=SIZE, process_bytes=0, **settings)


def test_a_billion_float32_weights_with_adamw_take_16_gb(job):
    memory = counted(job)
    assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (4e9, 4e9, 8e9)
    assert memory.state_bytes == 16 * BILLION


def test_each_part_is_divided_only_where_it_is_sharded(job):
    assert counted(job, Sharded.OPTIMIZER).state_bytes == (4 + 4 + 2) * BILLION
    assert counted(job, *ALL).state_bytes == 4 * BILLION


def test_zero_keeps_weights_in_the_precision_of_training_and_float32_copies_in_the_optimizer(job):
    memory = counted(job, Sharded.OPTIMIZER, overrides=["train.precision=bf16"], name="zero1")
    assert (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes) == (2e9, 2e9, 3e9)


def test_an_update_in_the_backward_pass_needs_one_gradient_at_a_time(job):
    overrides = ["train.optimizer.in_backward=true", "train.max_gradient_norm=null", "train.global_batch_size=4"]
    assert counted(job, overrides=overrides).gradients_bytes == 1000


def test_the_unsharded_gradient_of_an_accumulation_counts_on_every_rank(job):
    memory = counted(job, *ALL, unsharded_gradient_bytes=4 * BILLION)
    assert memory.state_bytes == 8 * BILLION
    assert " + unsharded gradient 4.0 GB, without activations" in memory.line


def test_the_line_names_the_parts_that_are_counted_and_those_that_are_not():
    memory = RankMemory(BILLION, 2 * BILLION, 3 * BILLION, process_bytes=BILLION)
    assert memory.line == (
        "memory: 7.0 GB per rank = weights 1.0 GB + gradients 2.0 GB + optimizer state 3.0 GB + process 1.0 GB, "
        "without activations (`finetune plan` predicts the peak)"
    )
    assert ", without the teacher and activations (" in replace(memory, has_teacher=True).line
    assert memory.peak_line.startswith("memory: weights, gradients and optimizer state 6.0 GB, measured peak ")


@pytest.mark.parametrize(
    ("name", "overrides", "process_bytes", "copied"),
    [
        ("ddp", [], 1, 12e9 / 4),  # weights and AdamW's two moments, a share on each of 4 ranks
        ("zero1", ["train.precision=bf16"], 1, 12e9 / 4),  # float32 masters instead of the weights
        ("ddp", ["checkpoint.asynchronous=false"], 1, 0),
        ("ddp", [], 0, 0),  # on a GPU the copy is host memory
    ],
)
def test_the_copy_of_a_checkpoint_counts_where_it_takes_the_memory_of_the_rank(
    job, name, overrides, process_bytes, copied
):
    config = load_config(job, overrides).config
    memory = count_state(config, strategy_of(name=name), size=SIZE, process_bytes=process_bytes)
    assert memory.copy_bytes == copied
    assert ("checkpoint.asynchronous: false" in memory.line) == bool(copied)


def test_the_free_memory_that_is_ample_on_a_cpu_follows_the_state():
    memory = RankMemory(BILLION, BILLION, BILLION)
    assert memory.ample_cpu_bytes == 4 * (4 * 3 * BILLION + (1 << 30))


def test_the_unsharded_gradient_counts_only_where_gradients_are_accumulated(job):
    config = load_config(job, []).config
    predict = predict_memory(config, strategy_of(*ALL), size=SIZE, process_bytes=0, unsharded_gradient_bytes=BILLION)
    assert predict(SimpleNamespace(num_batches=1)).unsharded_gradient_bytes == 0
    assert predict(SimpleNamespace(num_batches=2)).unsharded_gradient_bytes == BILLION
    assert predict(None).unsharded_gradient_bytes == 0
