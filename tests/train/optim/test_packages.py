"""AdamW of bitsandbytes and torchao."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.checkpoint.sharding.access import build_access
from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.train.optim.optimizers import begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters


def built(net, name):
    return build_optimizer(list_parameters(net), OptimizerSection(name=name), learning_rate=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA")
def test_8_bit_adamw_without_cpu_support_in_bitsandbytes_is_rejected_with_the_setting_to_write(monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda operator, key: False)
    with pytest.raises(ModelError, match="Write `name: adamw` with `state_dtype: int8`"):
        built(nn.Linear(4, 4), "adamw_8bit")


def test_8_bit_adamw_takes_a_step_on_a_cpu():
    pytest.importorskip("bitsandbytes", minversion="0.50")
    net = nn.Linear(64, 64, bias=False)
    optimizer = built(net, "adamw_8bit")
    net(torch.ones(2, 64)).sum().backward()
    before = net.weight.clone()
    optimizer.step()
    assert optimizer.state[net.weight]["state1"].dtype == torch.uint8
    assert not torch.equal(net.weight, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA")
@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw_8bit"])
def test_paged_moments_without_a_gpu_are_refused_with_the_setting_to_write(name):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ModelError, match=rf"train\.optimizer\.name: {name} needs a CUDA GPU.*Write `name: adamw`"):
        built(nn.Linear(4, 4), name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["paged_adamw", "paged_adamw_8bit"])
def test_paged_moments_take_a_step_on_a_gpu(name):
    pytest.importorskip("bitsandbytes")
    net = nn.Linear(512, 512, bias=False).cuda()
    optimizer = built(net, name)
    net(torch.ones(2, 512, device="cuda")).sum().backward()
    before = net.weight.clone()
    optimizer.step()
    assert optimizer.is_paged
    assert not torch.equal(net.weight, before)


@pytest.mark.full
def test_a_run_with_4_bit_moments_continues_from_a_saved_state_as_if_it_had_not_been_saved():
    pytest.importorskip("torchao")

    def step(net, optimizer, number):
        net(torch.full((2, 128), float(number))).pow(2).sum().backward()
        begin_step(optimizer, step=number, learning_rate=0.01 * number)
        optimizer.step()
        optimizer.zero_grad()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net, restored = nn.Linear(128, 64), nn.Linear(128, 64)
    optimizer, other = built(net, "adamw_4bit"), built(restored, "adamw_4bit")
    step(net, optimizer, 1)
    source, target = build_access(accelerator, net, optimizer), build_access(accelerator, restored, other)
    target.begin_writing()
    records = source.records()
    assert [record.key for record in records if record.name == "weight"] == [
        "parameter",
        *(f"{moment}.{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("codes", "qmap", "scale")),
    ]
    assert target.records() == records
    for record in records:
        target.write(record, source.read(record))
    target.write_scalars(source.read_scalars())
    for number in (2, 3):
        step(net, optimizer, number)
        step(restored, other, number)
    assert torch.equal(net.weight, restored.weight) and torch.equal(net.bias, restored.bias)
    assert optimizer.state[net.weight]["exp_avg"].codes.dtype == torch.uint8
