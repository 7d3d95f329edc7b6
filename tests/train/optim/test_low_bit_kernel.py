"""On a GPU an update with rounded states is one kernel per parameter, with the CPU's results at memory speed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from finetune.config.sections.train import OptimizerSection
from finetune.train.optim import low_bit, optimizers
from finetune.train.optim.optimizers import begin_step, build_optimizer, slow_update_warning
from finetune.train.optim.parameter_groups import list_parameters
from tests.devices import EVERY_DEVICE

SETTINGS = {
    "int8": (torch.float32, {"state_dtype": "int8"}),
    "bfloat16": (torch.float32, {"state_dtype": "bfloat16"}),
    "rounded": (torch.bfloat16, {"stochastic_rounding": True}),
    "both": (torch.bfloat16, {"stochastic_rounding": True, "state_dtype": "int8"}),
}
SHAPES = ((9, 512), (5, 48), (7, 250), (37,), (3, 4, 32))


class Parameters(nn.Module):
    """Parameters, with gradients per step that are equal on every device."""

    def __init__(self, shapes, dtype, device):
        super().__init__()
        self.chance = torch.Generator().manual_seed(3)
        self.all = nn.ParameterList(torch.randn(shape, generator=self.chance).to(device, dtype) for shape in shapes)

    def draw_gradients(self):
        for each in self.all:
            each.grad = torch.randn(each.shape, generator=self.chance).to(each.device, each.dtype)


def after_steps(device, settings, *, skipped=(), num_steps=4):
    """Return weights and state after these steps, with `found_inf` set as by the loop on a GPU."""
    dtype, section = SETTINGS[settings]
    model = Parameters(SHAPES, dtype, device)
    section = OptimizerSection(weight_decay=0.1, **section)
    optimizer = build_optimizer(list_parameters(model), section, learning_rate=0.1, seed=1)
    for step in range(num_steps):
        model.draw_gradients()
        begin_step(optimizer, step=step, learning_rate=1e-2)
        optimizer.found_inf = torch.tensor(float(step in skipped), device=device)
        optimizer.step()
    found = [{"weights": each.detach(), **optimizer.state[each]} for each in model.all]
    return [{key: value.cpu() for key, value in each.items()} for each in found]


def share_that_differs(ours, expected):
    """Return the largest fraction of a tensor's elements that differ by more than a unit in the last place."""

    def differs(one, other):
        return ~torch.isclose(one.float(), other.float(), rtol=2e-6, atol=1e-6)

    return max(
        differs(one[key], other[key]).float().mean().item()
        for one, other in zip(ours, expected, strict=True)
        for key in one
    )


@pytest.mark.parametrize("skipped", [(), (0,), (2,)])
@pytest.mark.parametrize("settings", SETTINGS)
@EVERY_DEVICE
def test_the_gpu_kernel_equals_the_cpu(device, settings, skipped, figure):
    """A difference in the last place in float32 may change the rounding of one element in thousands."""
    ours = after_steps(device, settings, skipped=skipped)
    assert (low_bit.has_kernel(torch.device(device))) == (device == "cuda")
    assert [each["step"].item() for each in ours] == [4.0 - len(skipped)] * len(SHAPES)
    share = share_that_differs(ours, after_steps("cpu", settings, skipped=skipped))
    figure(f"{settings}: elements that differ from the CPU's, share", share, at_most=0.005)


@pytest.mark.full
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_computes_the_cpus_numbers_in_tritons_interpreter():
    program = (
        "import sys; from finetune.train.optim import low_bit; import tests.train.optim.test_low_bit_kernel as test\n"
        "for settings in test.SETTINGS:\n"
        "    plain = test.after_steps('cpu', settings, skipped=(2,))\n"
        "    usual, low_bit.has_kernel = low_bit.has_kernel, lambda device: True\n"
        "    ours = test.after_steps('cpu', settings, skipped=(2,))\n"
        "    low_bit.has_kernel = usual\n"
        "    assert test.share_that_differs(ours, plain) < 0.005, settings\n"
        "print('compared')\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "compared\n", done.stderr[-2000:]


def test_plain_operators_on_a_gpu_are_warned_about(monkeypatch):
    optimizer = build_optimizer(
        list_parameters(nn.Linear(64, 4)), OptimizerSection(state_dtype="int8"), learning_rate=0.1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(optimizers, "missing_triton_toolchain", lambda: "triton is not installed")
    assert "but triton is not installed. Falling back to plain operators" in slow_update_warning(optimizer)
    assert slow_update_warning(torch.optim.AdamW([torch.zeros(1)])) is None
    monkeypatch.setattr(optimizers, "missing_triton_toolchain", lambda: None)
    assert slow_update_warning(optimizer) is None


THREE_BILLION = (
    (128256, 3072),
    *((3072, 3072), (1024, 3072), (1024, 3072), (3072, 3072)) * 28,
    *((8192, 3072),) * 84,
    *((3072,),) * 57,
)
"""Llama 3.2's, whose matrix downwards is given upright here."""


@pytest.mark.parametrize("state_dtype", [None, "int8"])
@EVERY_DEVICE
def test_rounding_stochastically_at_three_billion_takes_60_ms(device, state_dtype, figure):
    """3.2 billion weights in bfloat16: 14 bytes each are read and written with their moments, 10 with 8-bit ones."""
    shapes = (
        THREE_BILLION if device == "cuda" else [tuple(max(1, size // 48) for size in shape) for shape in THREE_BILLION]
    )
    model = nn.ParameterList(nn.Parameter(torch.ones(shape, dtype=torch.bfloat16, device=device)) for shape in shapes)
    section = OptimizerSection(stochastic_rounding=True, state_dtype=state_dtype)
    optimizer = build_optimizer(list_parameters(model), section, learning_rate=0.1, seed=1)
    for each in model:
        each.grad = torch.full_like(each, 0.5)
    begin_step(optimizer, step=0, learning_rate=1e-4)
    optimizer.step()
    assert 0.999 < model[0].float().mean().item() < 1.0
    assert len(model) == 254
    if device == "cpu":
        return
    milliseconds, num_kernels = timed(optimizer)
    figure(
        f"stochastic rounding at 3B with states in {state_dtype or 'bfloat16'}, ms a step", milliseconds, at_most=60.0
    )
    figure(f"kernels a step for 254 parameters, states in {state_dtype or 'bfloat16'}", num_kernels, at_most=300)
    del model, optimizer
    torch.cuda.empty_cache()


def timed(optimizer):
    """Return the median milliseconds of five updates, and the number of kernels that one launches."""
    found = []
    for step in range(1, 8):
        begin_step(optimizer, step=step, learning_rate=1e-4)
        optimizer.found_inf = torch.zeros((), device="cuda")
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        optimizer.step()
        stop.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(stop))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        optimizer.step()
        torch.cuda.synchronize()
    return sorted(found[2:])[2], sum(each.device_type == DeviceType.CUDA for each in seen.events())
