"""The update rule covers what learns."""

import pytest
import torch
from torch import nn

from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.train.optim import optimizers as rule
from finetune.train.optim.optimizers import begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("adafactor", torch.optim.Optimizer)]
)
def test_each_optimizer_takes_a_step(name, kind):
    net = model()
    optimizer = build_optimizer(list_parameters(net), OptimizerSection(name=name), learning_rate=0.1)
    assert isinstance(optimizer, kind)
    before = net[0].weight.clone()
    net(torch.ones(2, 4)).pow(3).sum().backward()
    begin_step(optimizer, step=0, learning_rate=0.05)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(net[0].weight, before)


def test_a_frozen_model_is_refused():
    with pytest.raises(ModelError, match="no parameter is trained"):
        build_optimizer(list_parameters(model().requires_grad_(False)), OptimizerSection(), learning_rate=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA")
def test_8_bit_adamw_without_cpu_support_in_bitsandbytes_is_rejected_with_the_setting_to_write(monkeypatch):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(rule, "_is_on_cpu", lambda operator: False)
    with pytest.raises(ModelError, match="Write `name: adamw` with `state_dtype: int8`"):
        build_optimizer(list_parameters(model()), OptimizerSection(name="adamw_8bit"), learning_rate=0.1)


def test_8_bit_adamw_takes_a_step_on_a_cpu():
    pytest.importorskip("bitsandbytes", minversion="0.50")
    net = nn.Linear(64, 64, bias=False)
    optimizer = build_optimizer(list_parameters(net), OptimizerSection(name="adamw_8bit"), learning_rate=0.1)
    net(torch.ones(2, 64)).sum().backward()
    before = net.weight.clone()
    optimizer.step()
    assert optimizer.state[net.weight]["state1"].dtype == torch.uint8
    assert not torch.equal(net.weight, before)
