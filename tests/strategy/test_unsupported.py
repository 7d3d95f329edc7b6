"""What is not supported is refused by name: in what Accelerate makes of a file, and in the file before a launch."""

import inspect
import json
import os
from pathlib import Path

import pytest
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from ruamel.yaml import YAML
from transformers.integrations import tensor_parallel

from finetune.commands.launch.job_files import make_job
from finetune.commands.rehearse.accelerate_file import read_accelerate_file
from finetune.errors import StrategyError
from finetune.strategy.environment import unsupported_by_environment, unsupported_in_file
from tests.refusals import refused

LOCAL = {"compute_environment": "LOCAL_MACHINE", "num_processes": 4, "num_machines": 1, "use_cpu": False}
FSDP2 = {**LOCAL, "distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}
AWS = {"ec2_instance_type": "ml.p3.2xlarge", "iam_role_name": "role", "mixed_precision": "no", "use_cpu": False}
DDP = {**LOCAL, "distributed_type": "MULTI_GPU"}
TENSOR = {**DDP, "parallelism_config": {"parallelism_config_tp_size": 4}}
COPIES = {**DDP, "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_dp_replicate_size": 2}}


def sized(name, size=2, **others):
    return {**FSDP2, "parallelism_config": {f"parallelism_config_{name}_size": size, **others}}


REFUSED = {
    "context": (sized("cp"), "parallelism_config_cp_size: 2: ring context parallelism", "parallelism_config_sp_size"),
    "Megatron": ({**LOCAL, "distributed_type": "MEGATRON_LM"}, "distributed_type: MEGATRON_LM: Megatron-LM", "NeMo"),
    "Megatron with stages": (
        {**LOCAL, "distributed_type": "MEGATRON_LM", "megatron_lm_config": {"megatron_lm_pp_degree": 2}},
        "distributed_type: MEGATRON_LM: Megatron-LM",
        "NeMo",
    ),
    "dynamo": (
        {**DDP, "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
        "dynamo_backend: INDUCTOR: `dynamo_backend`",
        "model.compile: regional",
    ),
    "DeepSpeed pipeline": (
        {"pipeline": {"stages": 2}},
        "the DeepSpeed config's section `pipeline`: pipeline parallelism",
        "nanotron",
    ),
    "DeepSpeed AutoTP": (
        {"tensor_parallel": {"autotp_size": 2}},
        "the DeepSpeed config's section `tensor_parallel`: tensor parallelism",
        "torchtitan",
    ),
    "NVMe": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}},
        "the DeepSpeed config's `zero_optimization.offload_optimizer.device: nvme`: NVMe offload",
        "Write `cpu`",
    ),
    "NVMe without a file of DeepSpeed's": (
        {
            **LOCAL,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/disk"},
        },
        "offload_param_device: nvme: NVMe offload",
        "Write `cpu`",
    ),
}
BEFORE_ACCELERATE = {
    "pipeline": (sized("pp"), "parallelism_config.parallelism_config_pp_size: `2`: pipeline parallelism", "nanotron"),
    "expert": (sized("ep"), "parallelism_config.parallelism_config_ep_size: `2`: expert parallelism", "DeepSpeed-MoE"),
    "no such size": (sized("xp"), "`2`: such a size is not supported: Accelerate does not know it", "Remove it"),
    "TPU": ({**LOCAL, "distributed_type": "XLA"}, "distributed_type: `XLA`: a TPU (XLA)", "MaxText"),
    "SageMaker": (
        {"compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "NO", **AWS},
        "compute_environment: `AMAZON_SAGEMAKER`: SageMaker's launcher",
        "LOCAL_MACHINE",
    ),
}


def written(folder, values):
    """Write the accelerate file; for a section of DeepSpeed's config the file that names it."""
    if "distributed_type" not in values:
        (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **values}))
        named = {"deepspeed_config_file": str(folder / "ds.json"), "zero3_init_flag": False}
        values = {**LOCAL, "distributed_type": "DEEPSPEED", "deepspeed_config": named}
    with (folder / "accelerate.yaml").open("w") as file:
        YAML(typ="safe").dump(values, file)
    return folder / "accelerate.yaml"


def launcher_environment(file, monkeypatch):
    """Return the variables that `accelerate launch` sets for a rank, made by its own code."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "PARALLELISM_", "FSDP_"))]:
        monkeypatch.delenv(name)
    parsed = launch_command_parser().parse_args(["--config_file", str(file), "job.py"])
    arguments, defaults, _ = _validate_launch_command(parsed)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        return prepare_multi_gpu_env(arguments)
    return prepare_simple_launcher_cmd_env(arguments)[1]


def deepspeed_config(variables):
    name = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return json.loads(Path(name).read_text()) if name else {}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_setting_is_found_in_the_environment_of_a_rank(tmp_path, monkeypatch, name):
    values, message, instead = REFUSED[name]
    variables = launcher_environment(written(tmp_path, values), monkeypatch)
    (found,) = unsupported_by_environment(variables, deepspeed_config(variables))
    assert found.startswith(message)
    assert instead in found


@pytest.mark.parametrize("name", [*REFUSED, *BEFORE_ACCELERATE])
def test_a_file_is_refused_before_it_is_launched(tmp_path, name):
    values, _, instead = {**REFUSED, **BEFORE_ACCELERATE}[name]
    file = written(tmp_path, values)
    content = YAML(typ="safe").load(file.read_text())
    ((_, message),) = unsupported_in_file(content)
    assert "is not supported" in message and instead in message
    with refused(StrategyError, "accelerate.yaml"):
        read_accelerate_file(file)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "rows.txt").write_text("one row\n")
    with refused(StrategyError):
        make_job(tmp_path / "job.yaml", [], accelerate_file=file, ranks_per_host=2)


JOB = """\
run: {folder: run}
model: {from_config: {model_type: llama}, tokenizer: {train: {}}}
data: {train: {path: rows.txt}, max_length: 16}
task: {name: pretrain}
train: {global_batch_size: 4, microbatch_size: 1, steps: 1, learning_rate: 1e-3}
"""


@pytest.mark.parametrize("name", ["pipeline", "expert", "no such size"])
def test_a_parallel_size_that_accelerate_ignores_is_found_only_in_the_file(tmp_path, monkeypatch, name):
    values, message, _ = BEFORE_ACCELERATE[name]
    variables = launcher_environment(written(tmp_path, values), monkeypatch)
    assert unsupported_by_environment(variables, {}) == ()  # once this fails, a rank can be told as well
    assert f"{next(iter(unsupported_in_file(values)))[0]}: `2`" in message or name == "no such size"


@pytest.mark.parametrize("values", [FSDP2, DDP, sized("dp_replicate"), sized("sp"), sized("tp", 1), TENSOR, COPIES])
def test_supported_accelerate_files_are_accepted(tmp_path, monkeypatch, values):
    assert list(unsupported_in_file(values)) == []
    assert unsupported_by_environment(launcher_environment(written(tmp_path, values), monkeypatch), {}) == ()


def test_tensor_parallelism_with_fsdp2_still_fails_upstream():
    """Ours does not go through Accelerate. Once this fails, look whether its could (docs/how-to/clusters.md)."""
    assert "from transformers.integrations.tensor_parallel import ReplicateParallel" in inspect.getsource(
        Accelerator._prepare_tp
    )
    if hasattr(tensor_parallel, "ReplicateParallel"):
        pytest.skip("transformers before 5.21 has it")
    with pytest.raises(AttributeError):
        tensor_parallel.ReplicateParallel  # noqa: B018
