"""What is missing to compile DeepSpeed's CPU Adam is said with the command that installs it, before a run starts."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from finetune.errors import StrategyError
from finetune.strategy import choose
from finetune.strategy.choose import BuildTools, ZeroRedundancy, missing_for_cpu_adam
from finetune.strategy.environment import LaunchEnvironment
from finetune.strategy.reconcile import JobSettings


@pytest.mark.parametrize(
    ("has_ninja", "compiler", "is_compiled", "command"),
    [
        (True, "/usr/bin/c++", False, None),
        (True, None, True, None),  # compiled already
        (False, "/usr/bin/c++", True, "pip install ninja"),
        (True, None, False, "apt-get install g++"),
    ],
)
@pytest.mark.parametrize("is_precompiled", [False, True])
def test_a_missing_tool_comes_with_the_command_that_installs_it(
    monkeypatch, tmp_path, has_ninja, compiler, is_compiled, command, is_precompiled
):
    monkeypatch.setattr(choose, "build_tools", lambda: BuildTools(has_ninja, compiler, nvcc=None))
    installed = SimpleNamespace(installed_ops={"cpu_adam": is_precompiled})
    monkeypatch.setattr(choose, "require", lambda *_, **__: installed)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    if is_compiled:
        (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
        (tmp_path / "py311_cpu" / "cpu_adam" / "cpu_adam.so").touch()
    missing = missing_for_cpu_adam()
    if command is None or is_precompiled:
        assert missing is None
    else:
        assert command in missing and "\n" not in missing


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
