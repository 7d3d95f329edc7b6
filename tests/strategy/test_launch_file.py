"""`--accelerate FILE` sets what `accelerate launch --config_file FILE` sets, and refuses what contradicts it."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from finetune.errors import StrategyError
from finetune.strategy.launch_file import is_set_by_accelerate, use_launch_file
from tests import launching
from tests.refusals import refused

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
PROGRAM = str(Path(__file__).with_name("launched_variables_program.py"))

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_OF_THE_FILE = re.compile(
    f"{'|'.join(RANKS)}|(TORCHELASTIC|GROUP|ROLE)_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING|_"
    "|PYTORCH_NVML_BASED_CUDA_CHECK"  # DeepSpeed sets it when it is imported, which the launcher does
)
"""Variables of torchrun, the shell and libraries."""


def of_the_file(variables: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    """Return what a launch has added for the file; folders that PYTHONPATH names twice count once."""
    added = {name: value for name, value in variables.items() if before.get(name) != value}
    if set(variables["PYTHONPATH"].split(":")) == set(before["PYTHONPATH"].split(":")):
        added.pop("PYTHONPATH", None)
    return {name: value for name, value in added.items() if not NOT_OF_THE_FILE.fullmatch(name)}


@pytest.fixture
def clean(monkeypatch):
    """An environment without ranks; what the test sets in it is undone."""
    before = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_")) or name in RANKS:
            monkeypatch.delenv(name)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.full
@pytest.mark.distributed
def test_every_file_gives_the_variables_of_accelerate_launch(tmp_path):
    assert len(CONFIGS) > 12
    output = tmp_path / "here.json"
    words = [sys.executable, PROGRAM, str(output), "--here", *map(str, CONFIGS)]
    log = tmp_path / "here.log"
    assert launching.run(words, log=log, timeout_seconds=120) == 0, log.read_text()
    here, before = json.loads(output.read_text()), {**os.environ, **launching.SETTINGS}
    different = {}
    for file in CONFIGS:
        output, log = tmp_path / f"{file.stem}.json", tmp_path / f"{file.stem}.log"
        processes = 1 if file.stem == "single" else 2
        command = launching.accelerate_command(file.stem, PROGRAM, str(output), processes=processes)
        command[3:3] = ["--num_machines", "1"]
        assert launching.run(command, log=log, timeout_seconds=120) == 0, log.read_text()
        launched, ours = (of_the_file(each, before) for each in (json.loads(output.read_text()), here[str(file)]))
        assert "ACCELERATE_MIXED_PRECISION" in launched  # it looked at something
        if launched != ours:
            different[file.stem] = set(launched.items()) ^ set(ours.items())
    assert different == {}


def write(path: Path, text: str) -> Path:
    path.write_text(f"compute_environment: LOCAL_MACHINE\nnum_machines: 1\nuse_cpu: false\n{text}")
    return path


FSDP2 = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2}\n"


def start_two(clean) -> None:
    for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        clean.setenv(name, value)


def test_ranks_come_from_the_launcher_and_settings_from_the_accelerate_file(clean, tmp_path):
    start_two(clean)
    clean.setenv("MASTER_PORT", "12345")
    assert not is_set_by_accelerate(os.environ)
    assert use_launch_file(write(tmp_path / "fsdp.yaml", FSDP2)) == []
    assert is_set_by_accelerate(os.environ)
    assert [os.environ[name] for name in ("RANK", "MASTER_PORT", "FSDP_VERSION")] == ["1", "12345", "2"]


def test_differences_between_launcher_and_accelerate_file_are_logged(clean, tmp_path):
    start_two(clean)
    clean.setenv("MASTER_ADDR", "node7")
    clean.setenv("MASTER_PORT", "29500")
    eight = (
        FSDP2.replace("num_processes: 2", "num_processes: 8") + "main_process_ip: 10.0.0.1\nmain_process_port: 29500\n"
    )
    file = write(tmp_path / "eight.yaml", eight)
    (told,) = use_launch_file(file)
    assert told == (
        f"--accelerate {file}: num_processes: 8 (here 2), main_process_ip: 10.0.0.1 (here node7). The launcher decides."
    )


def test_using_the_same_accelerate_file_twice_is_accepted(clean, tmp_path):
    start_two(clean)
    file = write(tmp_path / "fsdp.yaml", FSDP2)
    use_launch_file(file)
    assert use_launch_file(file) == []


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("FSDP_VERSION", "1", "FSDP_VERSION is 1, the file gives 2"),
        ("ACCELERATE_MIXED_PRECISION", "bf16", "ACCELERATE_MIXED_PRECISION is bf16, the file gives no"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "ACCELERATE_USE_DEEPSPEED is true, the file sets none"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2", "PARALLELISM_CONFIG_TP_SIZE is 2, the file sets none"),
    ],
)
def test_an_environment_that_contradicts_the_file_is_refused_and_left_alone(clean, tmp_path, variable, value, told):
    start_two(clean)
    clean.setenv(variable, value)
    before = dict(os.environ)
    with refused(StrategyError, told):
        use_launch_file(write(tmp_path / "fsdp.yaml", FSDP2))
    assert dict(os.environ) == before


def test_a_file_for_several_processes_without_a_launcher_is_refused(clean, tmp_path):
    with refused(StrategyError, "num_processes", "2,"):
        use_launch_file(write(tmp_path / "fsdp.yaml", FSDP2))


def test_a_file_for_one_process_makes_a_group_of_one(clean, tmp_path):
    file = write(tmp_path / "one.yaml", FSDP2.replace("num_processes: 2", "num_processes: 1"))
    assert use_launch_file(file) == []
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "ACCELERATE_USE_FSDP")] == ["0", "1", "true"]


def test_a_file_for_one_process_is_refused_for_two(clean):
    start_two(clean)
    with refused(StrategyError, "distributed_type"):
        use_launch_file(ROOT / "accelerate_configs" / "single.yaml")


def test_one_process_of_no_distribution_stays_alone(clean):
    assert use_launch_file(ROOT / "accelerate_configs" / "single.yaml") == []
    assert "RANK" not in os.environ and is_set_by_accelerate(os.environ)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2",
        "- a list",
        "distributed_type: FSDP\nnum_processes: two",
        "distributed_type: NOTHING",
        "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: seven",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nunknown_key: 1",
        "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp4",
        "distributed_type: MEGATRON_LM\nnum_processes: 2",
        "distributed_type: XLA\nnum_processes: 2",
        "distributed_type: MULTI_CPU\nnum_processes: 2\nmpirun_config: {mpirun_hostfile: hosts}",
        "\x00",
    ],
)
def test_a_file_that_accelerate_cannot_use_is_refused_in_one_message(clean, tmp_path, text):
    start_two(clean)
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    before = dict(os.environ)
    with refused(StrategyError, f"--accelerate {file}: "):
        use_launch_file(file)
    assert dict(os.environ) == before
