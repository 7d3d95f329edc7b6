"""Batch norms do not depend on the split of a step into microbatches and ranks."""

import copy

import pytest
import torch
from torch import nn

from finetune.errors import ModelError
from finetune.model import batch_norm
from finetune.model.batch_norm import set_batch_norm, sync_batch_norm, update_running_statistics
from tests.refusals import refused


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))


def grouped(size: int = 4) -> nn.Module:
    model = small_model().train()
    set_batch_norm(model, size, is_new=True)
    return model


SAMPLES = torch.randn(16, 2, 9, 9, generator=torch.Generator().manual_seed(1))


def test_frozen_norms_stay_in_evaluation_and_learn_scale_and_shift():
    model = small_model()
    set_batch_norm(model, None, is_new=False)
    before = copy.deepcopy(model.state_dict())
    expected = model.eval()(SAMPLES)
    found = model.train()(SAMPLES)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert model[1].weight.grad is not None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_single_group_equals_torch_s_batch_norm():
    model, plain = grouped(), small_model().train()
    torch.testing.assert_close(model(SAMPLES[:4]), plain(SAMPLES[:4]))
    sync_batch_norm(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def gradients_of(model: nn.Module, cuts: list[int]) -> list[torch.Tensor]:
    for part in torch.split(SAMPLES, cuts):
        model(part).square().sum().backward()
    update_running_statistics(model)
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("cuts", [[8, 8], [4, 4, 4, 4], [12, 4]])
def test_the_split_of_a_step_changes_neither_gradients_nor_statistics(cuts):
    one, other = grouped(), grouped()
    for expected, found in zip(gradients_of(one, [16]), gradients_of(other, cuts), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for model in (one, other):
        sync_batch_norm(model)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    assert one[1].num_batches_tracked == 1  # one step


def test_batch_norm_statistics_of_two_ranks_equal_those_of_one_process(monkeypatch):
    alone, ranks = grouped(), [grouped(), grouped()]
    for step in range(3):
        samples = SAMPLES + step
        alone(samples)
        update_running_statistics(alone)
        for model, part in zip(ranks, torch.split(samples, 8), strict=True):
            model(part)
            update_running_statistics(model)
    sent = []

    def summed(flat):
        sent.append(flat)
        return flat + other

    sync_batch_norm(alone)
    monkeypatch.setattr(batch_norm.distributed, "world", lambda: 2)
    monkeypatch.setattr(batch_norm.distributed, "sum_tensor", lambda flat: sent.append(flat) or flat)
    sync_batch_norm(copy.deepcopy(ranks[1]))
    (other,) = sent
    monkeypatch.setattr(batch_norm.distributed, "sum_tensor", summed)
    sync_batch_norm(ranks[0])
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ranks[0].state_dict()[name], value)


def test_non_finite_activations_do_not_change_batch_norm_statistics():
    model = grouped()
    model(SAMPLES * float("nan"))
    sync_batch_norm(model)
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_batch_with_an_incomplete_group_is_normalized_as_in_evaluation():
    model = grouped()
    found = model(SAMPLES[:3])
    assert torch.equal(found, model.eval()(SAMPLES[:3]))


@pytest.mark.parametrize(
    ("model", "how", "is_new"),
    [(small_model(), None, True), (nn.Linear(2, 2), "frozen", False), (nn.Sequential(nn.SyncBatchNorm(2)), 4, True)],
)
def test_invalid_batch_norm_settings_are_rejected(model, how, is_new):
    with refused(ModelError):
        set_batch_norm(model, how, is_new=is_new)
