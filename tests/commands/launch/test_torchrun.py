"""What `finetune launch torchrun` prints for each host, and what it refuses."""

from pathlib import Path

import pytest

from finetune.commands.launch.job_files import make_job
from finetune.commands.launch.torchrun import print_commands
from finetune.errors import UserError
from tests.refusals import refused

ROOT = Path(__file__).parents[3]
RECIPE = next(iter(sorted((ROOT / "finetune" / "recipes").glob("sft*.yaml"))))


def printed(strategy: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = ROOT / "accelerate_configs" / f"{strategy}.yaml"
    job, loaded = make_job(RECIPE, ["train.global_batch_size=8"], accelerate_file=file, ranks_per_host=2)
    print_commands(job, loaded, num_hosts=2)
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]


def test_each_host_gets_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    first, second = printed("multi_node_fsdp2", capsys)
    assert first.startswith("accelerate launch --config_file") and "--machine_rank 0" in first
    assert "--main_process_ip HOST0_ADDRESS --main_process_port 29500" in first
    assert second == first.replace("--machine_rank 0", "--machine_rank 1")
    assert "--set train.global_batch_size=8" in first and "deepspeed" not in first and "replicate" not in first


def test_hsdp_gets_a_copy_per_host_and_deepspeed_no_pdsh(capsys: pytest.CaptureFixture[str]) -> None:
    assert all("--parallelism_config_dp_replicate_size 2" in line for line in printed("multi_node_hsdp", capsys))
    assert all("--deepspeed_multinode_launcher standard" in line for line in printed("zero2", capsys))


def test_hsdp_whose_rows_are_shared_has_fewer_shards_on_a_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "accelerate_configs" / "multi_node_hsdp.yaml").read_text()
    shared = tmp_path / "shared.yaml"
    shared.write_text(text.replace("shard_size: 8", "shard_size: 4") + "  parallelism_config_sp_size: 2\n")
    options = {"accelerate_file": shared}
    job, loaded = make_job(RECIPE, ["train.global_batch_size=12"], ranks_per_host=4, **options)
    print_commands(job, loaded, num_hosts=3)
    found = capsys.readouterr().out
    assert found.count("--parallelism_config_dp_replicate_size 3 --parallelism_config_dp_shard_size 2") == 3
    with refused(UserError, "parallelism_config_sp_size: 2", "3 ranks"):
        make_job(RECIPE, [], ranks_per_host=3, **options)


def test_ranks_are_several_whole_tensor_parallel_groups(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"accelerate_file": ROOT / "accelerate_configs" / "tensor_parallel.yaml"}
    job, loaded = make_job(RECIPE, ["train.global_batch_size=4"], ranks_per_host=2, **options)
    print_commands(job, loaded, num_hosts=2)
    assert capsys.readouterr().out.count("accelerate launch") == 2
    job, loaded = make_job(RECIPE, ["train.global_batch_size=4"], ranks_per_host=3, **options)
    with refused(UserError, "parallelism_config_tp_size: 2", "3 processes"):
        print_commands(job, loaded, num_hosts=1)


def test_an_invalid_accelerate_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("[1, 2]")
    for name in ("none.yaml", "list.yaml"):
        with refused(UserError, name):
            make_job(RECIPE, [], accelerate_file=tmp_path / name, ranks_per_host=1)
