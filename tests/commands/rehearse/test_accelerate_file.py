"""The accelerate file is checked for the real machines and written for this one."""

from pathlib import Path

import pytest

from finetune.commands.rehearse.accelerate_file import for_this_machine, read_accelerate_file
from finetune.errors import StrategyError, UserError
from tests.refusals import refused

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"


def local_file(path, *, processes=4, is_fp16=False):
    """Return the file for this machine, and the changes."""
    return for_this_machine(read_accelerate_file(path), processes=processes, is_fp16=is_fp16)


def written(tmp_path, text):
    path = tmp_path / "accelerate.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_file_can_be_launched_on_this_machine(path):
    launch, _ = local_file(path)
    assert launch.values["num_machines"] == 1 and launch.values["num_processes"] == launch.num_processes
    assert launch.num_processes == (1 if path.stem == "single" else 4)
    assert "main_process_ip" not in launch.values
    kept = read_accelerate_file(path).values
    assert launch.values["distributed_type"] == kept["distributed_type"]
    assert launch.values.get("fsdp_config") == kept.get("fsdp_config")


def test_layers_that_fsdp2_shards_are_rehearsed_by_two_groups_of_two():
    launch, _ = local_file(CONFIGS / "fsdp2_tensor_parallel.yaml", processes=4)
    assert (launch.tensor_size, launch.data_parallel_size) == (2, 2)
    for processes in (2, 5):
        with pytest.raises(UserError, match=f"--processes {processes}: FSDP2 shards .* Write --processes 4"):
            local_file(CONFIGS / "fsdp2_tensor_parallel.yaml", processes=processes)


def test_hsdp_is_rehearsed_with_two_copies_of_two_shards():
    launch, changes = local_file(CONFIGS / "multi_node_hsdp.yaml")
    sizes = launch.values["parallelism_config"]
    assert (sizes["parallelism_config_dp_replicate_size"], sizes["parallelism_config_dp_shard_size"]) == (2, 2)
    assert any(change.key.endswith("shard_size") and (change.was, change.now) == (8, 2) for change in changes)
    with refused(UserError, "--processes 4"):
        local_file(CONFIGS / "multi_node_hsdp.yaml", processes=3)


def test_sequence_parallelism_is_rehearsed_with_two_processes(tmp_path):
    text = "distributed_type: FSDP\nnum_processes: 16\nparallelism_config:\n  parallelism_config_sp_size: 8\n"
    file = read_accelerate_file(written(tmp_path, text))
    launch, changes = for_this_machine(file, processes=4, is_fp16=False)
    assert (file.data_parallel_size, launch.data_parallel_size) == (2, 2)
    assert "parallelism_config.parallelism_config_sp_size: 8 -> 2" in " ".join(map(str, changes))
    with refused(StrategyError, "16 processes"):
        read_accelerate_file(written(tmp_path, text.replace("size: 8", "size: 3")))


def test_fp16_in_job_and_file_is_replaced_by_bf16(tmp_path):
    path = written(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: fp16\n")
    launch, changes = local_file(path, is_fp16=True)
    assert launch.values["mixed_precision"] == "bf16"
    assert "mixed_precision: fp16 -> bf16 (a CPU does not train in fp16)" in map(str, changes)
    assert local_file(path)[0].values["mixed_precision"] == "fp16"  # the job says otherwise: the run refuses it


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: XLA\n", "line 1, distributed_type: `XLA`"),
        ("num_processes: 8\n", "distributed_type: `None`"),
        ("distributed_type: FSDP\nnum_machines: 3\nnum_processes: 8\n", "line 3, num_processes: 8"),
        ("distributed_type: FSDP\nnum_processes: none\n", "line 2, num_processes: `none`"),
        ("distributed_type: FSDP\nnum_processes: 8\nuse_cpu: true\n", "line 3, use_cpu"),
        (
            "distributed_type: FSDP\nnum_processes: 16\nparallelism_config:\n"
            "  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 4\n",
            "2 copies",
        ),
        ("distributed_type: FSDP\nnum_processes: true\n", "line 2, num_processes: `True`"),
        ("distributed_type: FSDP\nnum_processes: 1000000000\n", "line 2, num_processes: `1000000000`"),
        ("distributed_type: FSDP\nfsdp_config: [1]\n", "line 2, fsdp_config: `[1]`"),
        ("distributed_type: FSDP\nparallelism_config: x\n", "line 2, parallelism_config: `x`"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: 1\n", "line 2, deepspeed_config: `1`"),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_dp_shard_size: x}\n",
            "parallelism_config_dp_shard_size: `x`",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: [1]}\n",
            "deepspeed_config_file: `[1]`",
        ),
    ],
)
def test_a_file_that_fails_on_the_real_machines_is_refused_with_its_line(tmp_path, text, message):
    with refused(StrategyError, message):
        read_accelerate_file(written(tmp_path, text))


def test_a_missing_file_is_one_message(tmp_path):
    with refused(UserError, "--accelerate", "gone.yaml"):
        read_accelerate_file(tmp_path / "gone.yaml")
