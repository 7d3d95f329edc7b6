"""Updates within the backward pass equal updates after it, and free their gradients."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.checkpoint import checkpoint

from finetune.config.sections.train import AverageSection, OptimizerSection, UnfreezeSection
from finetune.train.optim.optimizers import begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from finetune.train.update import Update, UpdateInBackward
from tests.devices import EVERY_DEVICE
from tests.train.deferred_checks import defer_finite_checks

IDS = torch.randint(0, 40, (8, 5), generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """An embedding tied to the head, and a numbered layer that is recomputed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))])

    def forward(self, ids):
        inside = self.embedding(ids)
        inside = inside + checkpoint(self.layers[0], inside, use_reentrant=False)
        return inside @ self.embedding.weight.t()


def made(*, in_backward, unfreeze=(), average=None, device="cpu", dtype=torch.float32, **section):
    torch.manual_seed(0)
    model = Tied().to(device, dtype)
    section = OptimizerSection(in_backward=in_backward, **{"weight_decay": 0.1, **section})
    built = build_optimizer(list_parameters(model), section, learning_rate=0.1, unfreeze=unfreeze, average=average)
    accelerator = Accelerator(cpu=device == "cpu")
    model, optimizer = accelerator.prepare(model, built)
    if in_backward:
        return model, built, UpdateInBackward(accelerator, model, optimizer)
    return model, built, Update(accelerator, model, optimizer, max_gradient_norm=None)


def step(model, optimizer, one, number, *, factor=1.0):
    begin_step(optimizer, step=number, learning_rate=1e-2 / (number + 1))
    ids = IDS.to(model.embedding.weight.device)
    loss = factor * nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.roll(1, 1).flatten())
    one.backward(loss)
    norm = one.clip()
    return loss.item(), norm.item(), one(norm, num_allowed=1)


SETTINGS = {
    "adamw": {},
    "groups": {
        "layer_decay": 0.5,
        "rates": {"*bias*": 3.0},
        "unfreeze": [UnfreezeSection(patterns=("layers.0.2.*",), after_steps=2)],
        "average": AverageSection(decay=0.5, after_steps=1),
    },
    "sgd": {"name": "sgd", "momentum": 0.9},
    "adafactor": {"name": "adafactor"},
    "muon": {"name": "muon"},
    "int8": {"state_dtype": "int8"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_updates_in_the_backward_pass_are_bitwise_identical(settings):
    usual, soon = made(in_backward=False, **settings), made(in_backward=True, **settings)
    for number in range(4):
        assert step(*soon, number) == step(*usual, number)
    for (name, one), other in zip(soon[0].named_parameters(), usual[0].parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.grad is None
        state, expected = soon[1].state[one], usual[1].state[other]
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value, key


def test_at_most_one_gradient_exists_at_a_time():
    model, optimizer, one = made(in_backward=True)
    seen = []
    optimizer.register_step_post_hook(
        lambda *_: seen.append(sum(parameter.grad is not None for parameter in model.parameters()))
    )
    step(model, optimizer, one, 0)
    assert seen == [1] * 5


def test_a_nonfinite_loss_changes_no_weight():
    model, optimizer, one = made(in_backward=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _, norm, is_taken = step(model, optimizer, one, 0, factor=float("nan"))
    assert norm != norm
    assert is_taken is False
    assert all(map(torch.equal, model.parameters(), before))


@pytest.fixture
def fresh_accelerator():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


ROUNDED = {
    "bfloat16": {"state_dtype": "bfloat16"},
    "rounded": {"stochastic_rounding": True, "dtype": torch.bfloat16},
    "both": {"stochastic_rounding": True, "dtype": torch.bfloat16, "state_dtype": "int8"},
}


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("settings", (SETTINGS | ROUNDED).values(), ids=SETTINGS | ROUNDED)
@EVERY_DEVICE
def test_an_injected_nan_leaves_weights_and_state_bit_for_bit(
    device, settings, in_backward, is_deferred, fresh_accelerator, monkeypatch
):
    if is_deferred:
        defer_finite_checks(monkeypatch)
    model, optimizer, one = made(in_backward=in_backward, device=device, **settings)
    step(model, optimizer, one, 0)
    before = copies_of(model, optimizer)
    assert step(model, optimizer, one, 1, factor=float("nan"))[2] is not True
    after = copies_of(model, optimizer)
    assert after.keys() == before.keys()
    assert len(before) > 9
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    one.mark_all_read()
    step(model, optimizer, one, 2)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not torch.equal(model.embedding.weight, before["embedding.weight"])


def copies_of(model, optimizer):
    named = dict(model.named_parameters())
    state = {
        f"{name}/{key}": torch.as_tensor(value).clone()
        for name, each in named.items()
        for key, value in optimizer.state[each].items()
    }
    return {name: each.detach().clone() for name, each in named.items()} | state


def test_a_nonfinite_gradient_prevents_later_updates_in_the_backward_pass():
    model, optimizer, one = made(in_backward=True)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    model.layers[0][2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * float("inf"),))
    assert step(model, optimizer, one, 0)[2] is False
    changed = {name for name, each in model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == {"layers.0.2.weight", "layers.0.2.bias"}
    assert "has not changed the weights" in one.nonfinite_effect
    assert "it has changed the weights whose gradients came first" in one.nonfinite_effect
