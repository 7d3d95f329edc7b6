"""What the launcher set is read into one record."""

import json

import pytest

from finetune.errors import StrategyError
from finetune.strategy.environment import read_environment, require_launcher
from tests.refusals import refused


def test_nothing_set_is_one_process():
    environment = read_environment({}, has_device=False)
    assert (environment.world, environment.is_fsdp, environment.zero_stage) == (1, False, None)


def test_fsdp_and_hsdp_sizes_are_read():
    environment = read_environment(
        {
            "WORLD_SIZE": "4",
            "RANK": "3",
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
            "FSDP_FORWARD_PREFETCH": "true",
            "FSDP_OFFLOAD_PARAMS": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
            "PARALLELISM_CONFIG_SP_SIZE": "2",
        },
        has_device=True,
    )
    assert (environment.world, environment.rank, environment.is_fsdp, environment.replicate_size) == (4, 3, True, 2)
    assert environment.sequence_size == 2 and not environment.unsupported
    assert environment.cpu_ram_efficient_loading
    assert environment.fsdp_forward_prefetch
    assert environment.fsdp_offload_params


def test_the_zero_stage_comes_from_the_deepspeed_config_file(tmp_path):
    file = tmp_path / "zero3.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert read_environment(variables, has_device=False).zero_stage == 3


def test_a_missing_deepspeed_config_is_reported_with_the_folder_it_is_relative_to(tmp_path):
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "no.json")}
    with refused(StrategyError):
        read_environment(variables, has_device=False)


def test_parallelism_that_is_not_supported_is_noted():
    (message,) = read_environment({"PARALLELISM_CONFIG_CP_SIZE": "2"}, has_device=True).unsupported
    assert "_size: 2: " in message and "parallelism_config_sp_size" in message


def test_the_processes_that_share_layers_come_from_the_launcher():
    environment = read_environment({"PARALLELISM_CONFIG_TP_SIZE": "2", "WORLD_SIZE": "2"}, has_device=True)
    assert (environment.tensor_size, environment.unsupported) == (2, ())


@pytest.mark.parametrize("flag", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_a_left_over_strategy_in_one_process_names_the_variables_to_unset(flag):
    left_over = {flag: "true", "FSDP_VERSION": "2", "HOME": "/root"}
    with refused(StrategyError, f"{flag}=true", f"unset {flag} FSDP_VERSION."):
        require_launcher(left_over)
    require_launcher({**left_over, "LOCAL_RANK": "0"})  # a launcher has started one process
    require_launcher({**left_over, flag: "false"})
