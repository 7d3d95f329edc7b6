"""Optimizers update all trained parameters."""

import pytest
import torch
from torch import nn

from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.train.optim.optimizers import begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from tests.refusals import refused


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
    with refused(ModelError):
        build_optimizer(list_parameters(model().requires_grad_(False)), OptimizerSection(), learning_rate=0.1)
