"""Optimizers update all trained parameters: torch's, Lion by the algorithm of its paper, those of other packages."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.checkpoint.sharding.access import build_access
from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.train.optim.optimizers import Lion, begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from tests.refusals import refused
from tests.train.optim.test_averages import Job


def built(net, name="adamw", *, learning_rate=0.1, **section):
    section = OptimizerSection(name=name, **section)
    return build_optimizer(list_parameters(net), section, learning_rate=learning_rate)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("adafactor", torch.optim.Optimizer)]
)
def test_each_optimizer_takes_a_step(name, kind):
    net = model()
    optimizer = built(net, name)
    assert isinstance(optimizer, kind)
    before = net[0].weight.clone()
    net(torch.ones(2, 4)).pow(3).sum().backward()
    begin_step(optimizer, step=0, learning_rate=0.05)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(net[0].weight, before)


def test_a_frozen_model_is_refused():
    with refused(ModelError):
        built(model().requires_grad_(False))


RATE = 0.05


def lion_by_hand(gradient, *, start: float, steps: int, betas=(0.9, 0.99), decay=0.0) -> tuple[float, float]:
    """Return weight and moment after some steps, in Python's own floats (Chen et al., 2023, algorithm 2)."""
    weight, moment = start, 0.0
    for _ in range(steps):
        g = gradient(weight)
        c = betas[0] * moment + (1 - betas[0]) * g
        weight -= RATE * ((c > 0) - (c < 0) + decay * weight)
        moment = betas[1] * moment + (1 - betas[1]) * g
    return weight, moment


@pytest.mark.parametrize("section", [{}, {"weight_decay": 0.3}, {"betas": [0.5, 0.6]}], ids=str)
def test_lion_is_the_papers_algorithm(section):
    net = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.constant_(net.weight, 0.6)
    optimizer = built(net, "lion", learning_rate=RATE, **section)
    for step in range(20):
        begin_step(optimizer, step=step, learning_rate=RATE)
        net.weight.grad = 2.0 * net.weight.detach()  # of its square: the weight passes 0, and the sign changes
        optimizer.step()
    betas, decay = section.get("betas", (0.9, 0.99)), section.get("weight_decay", 0.0)
    weight, moment = lion_by_hand(lambda value: 2.0 * value, start=0.6, steps=20, betas=betas, decay=decay)
    assert isinstance(optimizer, Lion)
    assert net.weight.item() == pytest.approx(weight, rel=1e-12)
    assert optimizer.state[net.weight]["exp_avg"].item() == pytest.approx(moment, rel=1e-12)


def test_a_parameter_without_a_gradient_stays_and_has_no_state():
    net = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    optimizer = built(net, "lion", learning_rate=RATE)
    before = net[1].weight.detach().clone()
    net[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(net[1].weight, before) and net[1].weight not in optimizer.state
    assert list(optimizer.state) == [net[0].weight]


def test_a_resumed_run_with_lion_is_bitwise_identical():
    straight = Job({"name": "lion", "weight_decay": 0.1}).take(range(3))
    resumed = Job({"name": "lion", "weight_decay": 0.1}).continue_from(straight)
    straight.take(range(3, 6))
    resumed.take(range(3, 6))
    expected, found = straight.everything(), resumed.everything()
    assert {"head.weight/exp_avg", "layers.0.weight/exp_avg"} < expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


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
