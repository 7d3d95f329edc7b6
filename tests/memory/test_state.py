"""Weights, gradients and optimizer state of a rank are counted, and a planned peak is the prediction."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.memory.state import (
    RankMemory,
    TrainingLayout,
    count_state,
    method_of,
    predict_memory,
    read_planned,
    write_planned,
)
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


def test_a_planned_peak_is_the_prediction():
    memory = RankMemory(BILLION, BILLION, BILLION, planned_bytes=7 * BILLION)
    assert memory.line.startswith("memory: 7.0 GB per rank, as planned = weights 1.0 GB + ")
    assert memory.line.endswith(" + optimizer state 1.0 GB + activations and buffers")
    assert memory.peak_line.startswith("memory: planned 7.0 GB, measured peak ")


def test_the_free_memory_that_is_ample_on_a_cpu_follows_the_state_or_the_plan():
    memory = RankMemory(BILLION, BILLION, BILLION)
    assert memory.ample_cpu_bytes == 4 * (4 * 3 * BILLION + (1 << 30))
    assert replace(memory, planned_bytes=BILLION).ample_cpu_bytes == 4 * BILLION


@pytest.mark.parametrize(("microbatch_size", "planned"), [(4, 10), (8, None)])
def test_the_peak_of_a_planned_run_is_read_at_its_start(job, tmp_path, microbatch_size, planned):
    config = load_config(job, [f"data.cache_folder={tmp_path / 'cache'}"]).config
    write_planned(config, [(TrainingLayout("fsdp2", 4, "full", False, 4, device="cuda"), 10)])
    device = SimpleNamespace(type="cuda")
    accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=None), device=device)
    predict = predict_memory(
        config, strategy_of(*ALL), size=SIZE, process_bytes=0, accelerator=accelerator, unsharded_gradient_bytes=BILLION
    )
    plan = SimpleNamespace(num_batches=1, microbatch_size=microbatch_size)
    assert predict(plan).planned_bytes == planned
    assert predict(plan).unsharded_gradient_bytes == 0
    assert predict(SimpleNamespace(num_batches=2, microbatch_size=4)).unsharded_gradient_bytes == BILLION
    assert predict(None).planned_bytes is None


OWN = TrainingLayout("fsdp2", 8, "full", False, 4, ranks_per_node=8)
HSDP = TrainingLayout("hsdp", 16, "full", False, 4, ranks_per_node=8)
WHERE = {"strategy": "fsdp2", "num_ranks": 8, "num_shards": 8, "microbatch_size": 4, "device": "cuda"}


@pytest.fixture
def config(job: Path, tmp_path: Path) -> RunConfig:
    return load_config(job, [f"data.cache_folder={tmp_path / 'cache'}"]).config


def changed(config: RunConfig, job: Path, *overrides: str) -> RunConfig:
    return load_config(job, [f"data.cache_folder={config.data.cache_folder}", *overrides]).config


def test_the_peak_of_a_planned_layout_is_read(config: RunConfig) -> None:
    assert read_planned(config, **WHERE) is None
    write_planned(config, [(OWN, 10), (HSDP, 20)])
    assert read_planned(config, **WHERE) == 10
    assert read_planned(config, **{**WHERE, "microbatch_size": 8}) is None
    assert read_planned(config, **{**WHERE, "device": "cpu"}) is None
    hybrid = {**WHERE, "strategy": "hsdp", "num_ranks": 16}
    assert read_planned(config, **hybrid) == 20
    assert read_planned(config, **{**hybrid, "num_shards": 4}) is None


def test_peaks_of_other_methods_than_the_jobs_are_not_written(config: RunConfig, job: Path) -> None:
    lora = changed(config, job, "model.lora={rank: 4}")
    assert (method_of(config), method_of(lora)) == ("full", "lora")
    write_planned(config, [(replace(OWN, method="lora"), 1), (replace(OWN, gradient_checkpointing=True), 2)])
    assert read_planned(config, **WHERE) is None
    assert read_planned(lora, **WHERE) is None


def test_only_settings_that_change_memory_separate_the_plans_of_jobs(config: RunConfig, job: Path) -> None:
    write_planned(config, [(OWN, 10)])
    for override in ("train.learning_rate=1e-5", "train.microbatch_size=2", "run.seed=3", "train.steps=99"):
        assert read_planned(changed(config, job, override), **WHERE) == 10, override
    for override in ("data.max_length=32", "train.precision=bf16", "train.optimizer.name=sgd"):
        assert read_planned(changed(config, job, override), **WHERE) is None, override


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"peak_bytes": 3}', '{"peak_bytes": {"x": "y"}}'])
def test_a_damaged_file_is_ignored(config: RunConfig, text: str) -> None:
    write_planned(config, [(OWN, 10)])
    (path,) = Path(str(config.data.cache_folder)).glob("plans/*.json")
    path.write_text(text)
    assert read_planned(config, **WHERE) is None
