"""The update rule covers what learns, and only matrices decay."""

import pytest
import torch
from torch import nn

from finetune.config.sections.train import OptimizerSection
from finetune.errors import ModelError
from finetune.train.optimizer import build_optimizer, decay_groups, set_learning_rate


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def test_matrices_decay_and_vectors_do_not():
    groups = decay_groups(model().named_parameters(), 0.1)
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [(0.1, 1), (0.0, 3)]


def test_a_partitioned_matrix_is_still_a_matrix():
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape = torch.Size((4, 4))  # as ZeRO-3 leaves it
    assert decay_groups([("weight", parameter)], 0.1)[0]["weight_decay"] == 0.1


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("adafactor", torch.optim.Optimizer)]
)
def test_each_optimizer_takes_a_step(name, kind):
    net = model()
    optimizer = build_optimizer(net.named_parameters(), OptimizerSection(name=name), learning_rate=0.1)
    assert isinstance(optimizer, kind)
    before = net[0].weight.clone()
    net(torch.ones(2, 4)).pow(3).sum().backward()
    set_learning_rate(optimizer, 0.05)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(net[0].weight, before)


def test_a_frozen_model_is_refused():
    with pytest.raises(ModelError, match="no parameter is trained"):
        build_optimizer(model().requires_grad_(False).named_parameters(), OptimizerSection(), learning_rate=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no CUDA")
def test_8_bit_adamw_without_cuda_says_what_to_write():
    with pytest.raises(ModelError, match="Write adamw"):
        build_optimizer(model().named_parameters(), OptimizerSection(name="adamw_8bit"), learning_rate=0.1)
