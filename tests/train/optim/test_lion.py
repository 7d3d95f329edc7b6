"""Lion's update equals algorithm 2 of the paper, and its state is saved, resumed and counted like any other."""

import pytest
import torch
from torch import nn

from finetune.config.sections.train import OptimizerSection
from finetune.model.size import optimizer_state_bytes
from finetune.train.optim.optimizers import Lion, begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from tests.train.optim.test_averages import Job

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
    optimizer = build_optimizer(list_parameters(net), OptimizerSection(name="lion", **section), learning_rate=RATE)
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
    optimizer = build_optimizer(list_parameters(net), OptimizerSection(name="lion"), learning_rate=RATE)
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


def test_lion_takes_half_of_the_memory_of_adamw():
    adamw, lion = (optimizer_state_bytes(name, None, num_trained=10, trained_bytes=40) for name in ("adamw", "lion"))
    assert (adamw, lion) == (80, 40)


def test_lion_has_the_decay_rates_of_its_paper_unless_they_are_written():
    assert OptimizerSection(name="lion").betas == (0.9, 0.99)
    assert OptimizerSection(name="lion", betas=[0.95, 0.98]).betas == (0.95, 0.98)
