"""Averages of the weights: their formulas by hand, their use in evaluations, and a bitwise identical resume."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from finetune.checkpoint.sharding.access import build_access
from finetune.config.sections.train import AverageSection, OptimizerSection, TrainSection
from finetune.errors import ModelError
from finetune.train.evaluate import AveragedWeights, average_formula
from finetune.train.optim.optimizers import IS_MUON, begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from tests.refusals import refused

RATE = 0.1


class Net(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class Job:
    """A few steps of one process."""

    def __init__(self, section: dict, average: AverageSection | None = None) -> None:
        torch.manual_seed(0)
        self.section = OptimizerSection(**section)
        self.train_section = TrainSection(
            global_batch_size=1, microbatch_size=1, steps=9, learning_rate=RATE, optimizer=self.section, average=average
        )
        net = Net()
        optimizer = build_optimizer(list_parameters(net), self.section, learning_rate=RATE, average=average)
        accelerator = Accelerator(cpu=True)
        self.net, self.optimizer = accelerator.prepare(net, optimizer)
        self.access = build_access(accelerator, self.net, self.optimizer)

    def take(self, steps: range) -> "Job":
        for step in steps:
            begin_step(self.optimizer, step=step, learning_rate=RATE)
            rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            self.net(rows).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def weight(self) -> torch.Tensor:
        return self.net.head.weight.detach().clone()

    def weights(self) -> AveragedWeights:
        key, formula = average_formula(self.train_section)
        return AveragedWeights(self.access, key, formula)

    def swapped_in(self) -> torch.Tensor:
        with self.weights().swapped_in():
            return self.weight()

    def everything(self) -> dict:
        self.access.begin_reading()
        return {record.stored_name: self.access.read(record).clone() for record in self.access.records()}

    def continue_from(self, other: "Job") -> "Job":
        """Copy the other job's state as a checkpoint would, tensor by tensor and number by number."""
        self.access.begin_writing()
        for record in other.access.records():
            self.access.write(record, other.access.read(record).clone())
        self.access.write_scalars(other.access.read_scalars())
        self.access.finish_writing()
        return self


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
def test_the_average_equals_the_weights_at_first_and_then_follows_them(optimizer):
    job = Job({"name": optimizer}, AverageSection(decay=0.8, after_steps=2))
    average = job.weight()
    for step in range(5):
        job.take(range(step, step + 1))
        average = job.weight() if step < 2 else 0.8 * average + 0.2 * job.weight()
        torch.testing.assert_close(job.swapped_in(), average)
    assert not torch.equal(job.swapped_in(), job.weight())


def test_the_average_can_start_with_the_initial_weights():
    job = Job({}, AverageSection(decay=0.8))
    first = job.weight()
    torch.testing.assert_close(job.swapped_in(), first)
    job.take(range(1))
    torch.testing.assert_close(job.swapped_in(), 0.8 * first + 0.2 * job.weight())


def test_an_update_skipped_by_overflow_does_not_change_the_average():
    job = Job({}, AverageSection(decay=0.5)).take(range(2))
    before = job.everything()
    job.optimizer.optimizer.found_inf = torch.tensor(1.0)  # as torch's GradScaler tells a fused optimizer
    job.take(range(2, 3))
    after = job.everything()
    assert torch.equal(before["head.weight"], after["head.weight"])
    assert torch.equal(before["head.weight/average"], after["head.weight/average"])


def test_weights_in_16_bits_have_an_average_in_32():
    net = nn.Linear(2, 2).bfloat16()
    optimizer = build_optimizer(
        list_parameters(net), OptimizerSection(fused=False), learning_rate=0.1, average=AverageSection()
    )
    begin_step(optimizer, step=0, learning_rate=0.1)
    net(torch.ones(1, 2).bfloat16()).sum().backward()
    optimizer.step()
    assert optimizer.state[net.weight]["average"].dtype == torch.float32


def schedule_free_by_hand(gradient, *, start: float, steps: int, betas=(0.9, 0.999), eps=1e-8) -> tuple[float, float]:
    """Return y and x after Algorithm 1 of the paper, for a single number."""
    x = z = start
    y, second, weight_sum = start, 0.0, 0.0
    for step in range(1, steps + 1):
        slope = gradient(y)
        second = betas[1] * second + (1 - betas[1]) * slope**2
        z -= RATE * slope / ((second / (1 - betas[1] ** step)) ** 0.5 + eps)
        weight_sum += RATE**2
        share = RATE**2 / weight_sum
        x = (1 - share) * x + share * z
        y = betas[0] * x + (1 - betas[0]) * z
    return y, x


def test_schedule_free_is_the_papers_algorithm():
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 2.0)
    section = OptimizerSection(name="schedule_free_adamw")
    optimizer = build_optimizer(list_parameters(net), section, learning_rate=RATE)
    for step in range(4):
        begin_step(optimizer, step=step, learning_rate=RATE)
        net.weight.grad = 3.0 * net.weight.detach() ** 2
        optimizer.step()
    y, x = schedule_free_by_hand(lambda value: 3.0 * value**2, start=2.0, steps=4)
    assert net.weight.item() == pytest.approx(y, rel=1e-12)
    _, formula = average_formula(
        TrainSection(global_batch_size=1, microbatch_size=1, steps=4, learning_rate=RATE, optimizer=section)
    )
    assert formula(net.weight, optimizer.state[net.weight]["z"]).item() == pytest.approx(x, rel=1e-12)


def test_muon_makes_hidden_matrices_orthogonal_and_leaves_the_rest_to_adamw():
    job = Job({"name": "muon", "weight_decay": 0.0})
    held = {IS_MUON: set(), "adamw": set()}
    for group in job.optimizer.param_groups:
        held[IS_MUON if group[IS_MUON] else "adamw"] |= {tuple(each.shape) for each in group["params"]}
    assert held == {IS_MUON: {(4, 3), (4, 4)}, "adamw": {(4,), (1,), (1, 4)}}
    before = job.net.layers[1].weight.detach().clone()
    job.take(range(1))
    update = (before - job.net.layers[1].weight.detach()) / (RATE * 0.2 * 4**0.5)
    assert torch.linalg.svdvals(update).sub(1.0).abs().max() < 0.5  # within the rule's own bounds
    assert {"exp_avg", "exp_avg_sq", "step"} == set(job.optimizer.state[job.net.head.weight])


def test_muon_without_a_hidden_matrix_is_refused():
    with refused(ModelError, "adamw"):
        build_optimizer(list_parameters(nn.Linear(2, 2)), OptimizerSection(name="muon"), learning_rate=0.1)


@pytest.mark.parametrize(
    ("section", "average"),
    [({}, AverageSection(decay=0.7)), ({"name": "muon"}, None), ({"name": "schedule_free_adamw"}, None)],
    ids=["average", "muon", "schedule_free"],
)
def test_a_resumed_average_is_bitwise_identical(section, average):
    straight = Job(section, average).take(range(3))
    saved = Job(section, average).continue_from(straight)
    saved.take(range(3, 6))
    straight.take(range(3, 6))
    there, here = straight.everything(), saved.everything()
    assert there.keys() == here.keys() and len(there) > len(list(Net().parameters()))
    assert all(torch.equal(there[name], here[name]) for name in there)
    assert straight.access.read_scalars() == saved.access.read_scalars()


@pytest.mark.parametrize(
    ("section", "average"), [({}, AverageSection(decay=0.7)), ({"name": "schedule_free_adamw"}, None)]
)
def test_the_weights_are_bitwise_restored_after_an_evaluation(section, average):
    job = Job(section, average).take(range(2))
    before, weights = job.everything(), job.weights()
    with weights.swapped_in():
        seen = job.net.head.weight[0, 0].item()
    assert seen == pytest.approx(job.swapped_in()[0, 0].item())
    after = job.everything()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weights_are_unchanged_without_an_average():
    assert average_formula(Job({}).train_section) is None
