"""Each workaround is still needed: a test here that fails says which one may go."""

import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from finetune.checkpoint.upstream import CHECKED_WITH, restore_cpu_adam_step


@pytest.mark.parametrize("package", CHECKED_WITH)
def test_no_package_is_newer_than_the_workarounds_were_checked_with(package):
    pytest.importorskip(package)
    newest = Version(CHECKED_WITH[package])
    assert Version(version(package)).release[:2] <= newest.release, (
        f"look at each workaround for {package} in checkpoint/upstream.py, then raise CHECKED_WITH"
    )


def test_zero3_still_gives_its_optimizer_parameters_within_a_step_only():
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3").DeepSpeedZeroOptimizer_Stage3
    source = inspect.getsource(stage3._optimizer_step)
    assert "optimizer.param_groups[param_group_id]['params'] = []" in source
    whole = Path(inspect.getsourcefile(stage3)).read_text(encoding="utf-8")
    assert whole.count("self._reassign_or_swap_out_partitioned_parameters(sub_group_id)") >= 1


def test_the_kernel_of_cpu_adam_still_uses_pow_where_the_step_jumps():
    deepspeed = pytest.importorskip("deepspeed")
    header = Path(deepspeed.__file__).parent / "ops" / "csrc" / "includes" / "cpu_adam.h"
    _, _, body = header.read_text(encoding="utf-8").partition("IncrementStep(")
    assert "_betta1_t *= _betta1;" in body
    assert "_betta1_t = std::pow(_betta1, step);" in body


def test_the_step_of_cpu_adam_is_counted_up_and_other_optimizers_are_left_alone():
    class Kernel:
        def __init__(self):
            self.steps = []

        def adam_update(self, _, step, *rest):
            self.steps.append(step)

    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight] = {"step": torch.tensor(3.0)}
    restore_cpu_adam_step(optimizer)
    optimizer.ds_opt_adam, optimizer.opt_id = Kernel(), 0
    restore_cpu_adam_step(optimizer)
    assert optimizer.ds_opt_adam.steps == [1, 2, 3]
