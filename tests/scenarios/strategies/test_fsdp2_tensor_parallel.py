"""FSDP2 shards what groups of ranks split by tensor parallelism: such a run trains as one process does."""

from pathlib import Path

import pytest

from tests.scenarios.conftest import launch_in_turn
from tests.scenarios.strategies.test_tensor_parallel import (
    LORA,
    SETTINGS,
    assert_equal,
    assert_same_export,
    settings_of,
)

pytestmark = [pytest.mark.distributed, pytest.mark.full]

STRATEGY = "fsdp2_tensor_parallel"
SMALL = (*SETTINGS, "train.microbatch_size=2")
FILES = Path(__file__).parents[3] / "accelerate_configs"


def test_adapters_have_the_losses_and_the_export_of_one_process(launch):
    """Also resumed: from tensor parallelism alone, and from FSDP2 alone; adapters are on routed experts, too."""
    overrides = [*SMALL, *LORA, "export.merge=true", *settings_of("qwen3_moe")]
    alone = launch(None, name="fsdp2-tp-alone-lora", overrides=overrides)
    stages = (("tensor_parallel", 2, 2), (STRATEGY, 4, 4), ("fsdp2", 2, 6), (STRATEGY, 4, 8))
    run = launch_in_turn(launch, name="fsdp2-tp-lora", overrides=overrides, stages=stages)
    assert_equal(run, alone)
    assert_same_export(run, alone)


def test_checkpoints_resume_under_other_strategies_and_bitwise_under_the_same(launch):
    """Of a model with gate and up in one matrix, of which FSDP2 shards what a rank of a group has of both."""
    overrides = [*SMALL, "checkpoint={every_steps: 2, keep_last: 4}", *settings_of("phi3")]
    whole = launch(STRATEGY, name="fsdp2-tp-whole", processes=4, overrides=overrides)
    stages = ((STRATEGY, 4, 2), (STRATEGY, 4, 4), ("zero3", 2, 6), (None, 1, 8))
    run = launch_in_turn(launch, name="fsdp2-tp-parts", overrides=overrides, stages=stages)
    assert_equal(run, whole)
    assert run.samples() == whole.samples()
    assert run.losses()[:4] == whole.losses()[:4]
    first, second = (
        {file.name: file.read_bytes() for file in sorted((ended.folder / "checkpoints/step-000004").rglob("*.safe*"))}
        for ended in (whole, run)
    )
    assert first == second
    assert len(first) >= 4


def test_copies_of_two_groups_have_the_losses_of_one_process(launch, tmp_path):
    """HSDP: two copies of what two groups of two ranks share."""
    written = (FILES / f"{STRATEGY}.yaml").read_text()
    sizes = "\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 2\n"
    (tmp_path / "copies.yaml").write_text(written + sizes)
    overrides = [*SETTINGS, "train.microbatch_size=1", "train.steps=4"]
    alone = launch(None, name="hsdp-tp-alone", overrides=overrides)
    run = launch(str(tmp_path / "copies"), name="hsdp-tp", processes=8, overrides=overrides)
    assert "hsdp on 8 processes" in run.output
    assert_equal(run, alone)
