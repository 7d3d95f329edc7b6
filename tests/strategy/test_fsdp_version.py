"""An accelerate file for FSDP1, as `accelerate config` writes it, runs under FSDP2."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.to_fsdp2 import convert_config_to_fsdp2

from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.errors import StrategyError
from finetune.strategy.environment import to_fsdp2, use_fsdp2
from finetune.strategy.launch_file import launch_variables
from tests.refusals import refused

FSDP1 = Path(__file__).with_name("fsdp1.yaml")


def written(folder: Path, *, without: tuple[str, ...] = (), **settings: object) -> Path:
    """Write the file with other settings of FSDP, and without some."""
    values = yaml.safe_load(FSDP1.read_text())
    values["fsdp_config"] |= {f"fsdp_{key}": value for key, value in settings.items()}
    for key in without:
        del values["fsdp_config"][f"fsdp_{key}"]
    path = folder / "fsdp.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def fsdp2_variables(file: Path) -> tuple[dict[str, str], list[str]]:
    """Return what a launch with the file sets for FSDP2, and what is logged."""
    variables = launch_variables(file)
    sentences = use_fsdp2(variables)
    return {name: value for name, value in variables.items() if name.startswith("FSDP_")}, sentences


def test_variables_of_the_launcher_for_fsdp1_become_those_for_fsdp2():
    variables, (sentence,) = fsdp2_variables(FSDP1)
    assert (variables["FSDP_VERSION"], variables["FSDP_RESHARD_AFTER_FORWARD"]) == ("2", "true")
    assert (variables["FSDP_CPU_RAM_EFFICIENT_LOADING"], variables["FSDP_OFFLOAD_PARAMS"]) == ("true", "false")
    removed = {"FSDP_BACKWARD_PREFETCH", "FSDP_SYNC_MODULE_STATES", "FSDP_USE_ORIG_PARAMS", "FSDP_SHARDING_STRATEGY"}
    assert not removed & variables.keys()
    assert "fsdp_reshard_after_forward: FULL_SHARD is fsdp_reshard_after_forward: true" in sentence
    assert "fsdp_backward_prefetch, fsdp_sync_module_states, fsdp_use_orig_params" in sentence
    assert use_fsdp2(launch_variables(FSDP1) | variables) == []  # it is FSDP2 by now


def test_a_file_without_a_version_is_one_for_fsdp1(tmp_path):
    file = written(tmp_path, without=("version",))
    assert fsdp2_variables(file) == fsdp2_variables(FSDP1)
    by_hand = {"ACCELERATE_USE_FSDP": "true"}
    assert len(use_fsdp2(by_hand)) == 1
    assert by_hand == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "hsdp", "zero3"])
def test_every_other_launch_is_left_alone(name):
    variables = launch_variables(FSDP1.parents[2] / "accelerate_configs" / f"{name}.yaml")
    before = dict(variables)
    assert use_fsdp2(variables) == []
    assert variables == before


@pytest.mark.parametrize("key", ["sharding_strategy", "reshard_after_forward"])
@pytest.mark.parametrize(
    ("strategy", "reshards"),
    [
        ("FULL_SHARD", "true"),
        ("SHARD_GRAD_OP", "false"),
        ("NO_SHARD", "false"),
        ("HYBRID_SHARD", "true"),
        ("HYBRID_SHARD_ZERO2", "false"),
    ],
)
def test_a_sharding_strategy_is_translated_as_accelerate_does(tmp_path, key, strategy, reshards):
    without = () if key == "reshard_after_forward" else ("reshard_after_forward",)
    file = written(tmp_path, without=without, **{key: strategy})
    accelerates = convert_config_to_fsdp2(yaml.safe_load(file.read_text()))["fsdp_config"]
    assert str(accelerates["fsdp_reshard_after_forward"]).lower() == reshards
    variables, (sentence,) = fsdp2_variables(file)
    assert variables["FSDP_RESHARD_AFTER_FORWARD"] == reshards
    assert f"fsdp_{key}: {strategy} is fsdp_reshard_after_forward: {reshards}" in sentence


@pytest.mark.parametrize(
    "settings",
    [
        {"state_dict_type": "LOCAL_STATE_DICT"},
        {"auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"sharding_strategy": "SHARD_SOME"},
        {"reshard_after_forward": "NO_RESHARD"},
    ],
)
def test_settings_that_fsdp2_does_not_support_are_refused_by_name(tmp_path, settings):
    file = written(tmp_path, **settings)
    with refused(StrategyError):
        fsdp2_variables(file)
    key = f"fsdp_config.fsdp_{next(iter(settings))}"
    with refused(StrategyError, "fsdp.yaml, line ", f"{key}: "):
        read_accelerate_file(file)


def test_a_file_for_fsdp1_is_noted_before_the_launch(tmp_path):
    (note,) = read_accelerate_file(FSDP1).notes
    assert note.startswith("fsdp_version: 1 runs under FSDP2")
    assert read_accelerate_file(written(tmp_path, version=2, reshard_after_forward=True)).notes == ()
    ddp = FSDP1.parents[2] / "accelerate_configs" / "ddp.yaml"
    assert read_accelerate_file(ddp).notes == ()


def test_prefetching_in_the_forward_pass_is_kept():
    assert to_fsdp2({"fsdp_forward_prefetch": True}).removed == ()
