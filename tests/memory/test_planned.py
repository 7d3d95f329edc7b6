"""A predicted peak is read at the start of the run that was planned, and of no other."""

from dataclasses import replace
from pathlib import Path

import pytest

from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.memory.layout import Layout, method_of
from finetune.memory.planned import read_planned, write_planned

OWN = Layout("fsdp2", 8, "full", False, 4, ranks_per_node=8)
HSDP = Layout("hsdp", 16, "full", False, 4, ranks_per_node=8)
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
