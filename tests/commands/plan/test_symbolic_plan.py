"""A plan by the job's own symbolic step, without a stand-in."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.plan.plan import PlanOptions, make_plan
from finetune.config.load import load_config


@pytest.mark.full
def test_the_symbolic_step_predicts_every_strategy(job_file: Callable[..., Path]):
    """12 layers of width 768: weights, gradients and moments are 16 bytes for each parameter on one GPU."""
    plan = make_plan(load_config(job_file("125m"), []), PlanOptions(gpus="2xL4"))
    (found,) = plan.machines
    fitting = {each.strategy for each in found.plans if each.fits}
    assert fitting >= {"ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}
    ddp = next(each.fit for each in found.plans if each.strategy == "ddp")
    assert ddp is not None and ddp.smallest.peak_bytes > 16 * ddp.smallest.num_parameters
    assert ddp.smallest.num_parameters == ddp.smallest.num_trained
    assert found.best is not None and found.outlook is not None
