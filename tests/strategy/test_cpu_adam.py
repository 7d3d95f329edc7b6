"""What is missing to compile DeepSpeed's CPU Adam is said with the command that installs it, before a run starts."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from finetune.errors import StrategyError
from finetune.strategy import choose
from finetune.strategy.choose import BuildTools, ZeroRedundancy, build_tools, missing_for_cpu_adam, missing_tool
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.reconcile import JobSettings

ALL = BuildTools(has_ninja=True, compiler="/usr/bin/c++", nvcc="/usr/local/cuda/bin/nvcc")
NONE = BuildTools(has_ninja=False, compiler=None, nvcc=None)


def test_with_all_tools_nothing_is_missing():
    assert missing_tool(ALL, needs_nvcc=True, is_compiled=False) is None


@pytest.mark.parametrize(
    ("tools", "command"),
    [
        (NONE, "pip install ninja"),
        (BuildTools(has_ninja=True, compiler=None, nvcc=None), "apt-get install g++"),
        (BuildTools(has_ninja=True, compiler="c++", nvcc=None), "export CUDA_HOME="),
    ],
)
def test_the_first_missing_tool_comes_with_the_command_that_installs_it(tools, command):
    missing = missing_tool(tools, needs_nvcc=True, is_compiled=False)
    assert command in missing
    assert "\n" not in missing


def test_nvcc_is_needed_only_by_a_builder_for_cuda_and_a_compiler_only_once():
    without_nvcc = BuildTools(has_ninja=True, compiler="c++", nvcc=None)
    assert missing_tool(without_nvcc, needs_nvcc=False, is_compiled=False) is None
    assert missing_tool(BuildTools(True, None, None), needs_nvcc=True, is_compiled=True) is None
    assert "ninja" in missing_tool(NONE, needs_nvcc=False, is_compiled=True)


def test_tools_are_looked_for_where_torch_looks():
    asked = []

    def which(name):
        asked.append(name)
        return name if name == "my-c++" else None

    assert build_tools({"CXX": "my-c++"}, which=which).compiler == "my-c++"
    assert {"ninja", "my-c++"} <= set(asked)


class CudaBuilder:
    """What DeepSpeed calls CUDAOpBuilder."""


@pytest.mark.parametrize(("is_of_cuda", "is_missing"), [(True, True), (False, False)])
def test_on_a_gpu_deepspeeds_own_builder_decides_whether_nvcc_is_needed(monkeypatch, tmp_path, is_of_cuda, is_missing):
    builder = type("CPUAdamBuilder", (CudaBuilder,) if is_of_cuda else (), {})
    parts = {
        "git_version_info": SimpleNamespace(installed_ops={}),
        "ops.op_builder": SimpleNamespace(CPUAdamBuilder=builder),
        "ops.op_builder.builder": SimpleNamespace(CUDAOpBuilder=CudaBuilder),
    }
    monkeypatch.setattr(choose, "_part_of_deepspeed", parts.__getitem__)
    monkeypatch.setattr(choose, "build_tools", lambda: BuildTools(has_ninja=True, compiler="c++", nvcc=None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert (missing_for_cpu_adam() is not None) == is_missing


def test_an_adam_that_came_compiled_needs_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "_part_of_deepspeed", lambda _: SimpleNamespace(installed_ops={"cpu_adam": True}))
    monkeypatch.setattr(choose, "build_tools", lambda: NONE)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert missing_for_cpu_adam() is None


def test_deepspeed_still_builds_its_cpu_adam_without_nvcc():
    builders = pytest.importorskip("deepspeed.ops.op_builder")
    base = pytest.importorskip("deepspeed.ops.op_builder.builder")
    assert not issubclass(builders.CPUAdamBuilder, base.CUDAOpBuilder)


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", True), ("none", False)])
def test_a_launch_with_an_offloaded_optimizer_is_refused_before_anything_is_loaded(monkeypatch, device, is_refused):
    pytest.importorskip("deepspeed")
    monkeypatch.setattr("finetune.strategy.choose._watch_builds", lambda: None)
    monkeypatch.setattr("finetune.strategy.choose.missing_for_cpu_adam", lambda: "there is no C++ compiler.")
    job = JobSettings(strategy=None, precision="bf16", microbatch_size=1, max_gradient_norm=1.0)
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": device}}}
    strategy = ZeroRedundancy(LaunchEnvironment(has_device=True, zero_stage=2, deepspeed=config), job)
    if is_refused:
        with pytest.raises(
            StrategyError, match="zero2 with an offloaded optimizer cannot start on this machine: there is no C"
        ):
            strategy.accelerator_context(timeout=timedelta(minutes=1))
    else:
        strategy.accelerator_context(timeout=timedelta(minutes=1))
