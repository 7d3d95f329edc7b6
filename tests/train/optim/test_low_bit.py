"""Stochastic rounding is unbiased, and depends only on an element's index."""

import pytest
import torch
from torch import nn

from finetune.config.sections.train import OptimizerSection
from finetune.train.optim import low_bit
from finetune.train.optim.low_bit import (
    LowBitAdamW,
)
from finetune.train.optim.optimizers import begin_step, build_optimizer, uses_low_bit_adamw
from finetune.train.optim.parameter_groups import list_parameters
from finetune.train.upstream import supports_found_inf

CPU = torch.device("cpu")


ROWS = torch.randn(64, 48, generator=torch.Generator().manual_seed(1))
WANTED = torch.randn(64, 8, generator=torch.Generator().manual_seed(2))


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 8)).to(dtype)


def optimizer_of(model, *, seed=1, **section):
    section = OptimizerSection(weight_decay=0.1, **section)
    return build_optimizer(list_parameters(model), section, learning_rate=0.1, seed=seed)


def trained(model, optimizer, *, steps=60, first=0):
    losses = []
    for step in range(first, steps):
        begin_step(optimizer, step=step, learning_rate=1e-2)
        loss = (model(ROWS.to(model[0].weight.dtype)).float() - WANTED).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def low_bit_of(model, *, state_dtype, **section):
    """Return LowBitAdamW even where plain AdamW would be used."""
    built = optimizer_of(model, state_dtype="int8", **section)
    built._state_dtype = state_dtype
    return built


def test_low_bit_adamw_with_float32_state_equals_adamw():
    plain, ours = net(), net()
    expected = trained(plain, optimizer_of(plain), steps=10)
    found = trained(ours, low_bit_of(ours, state_dtype=torch.float32), steps=10)
    assert found == pytest.approx(expected, rel=1e-6)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
def test_quantized_moments_reach_the_same_loss(state_dtype):
    plain, ours = net(), net()
    expected = trained(plain, optimizer_of(plain))
    built = optimizer_of(ours, state_dtype=state_dtype)
    found = trained(ours, built)
    assert isinstance(built, LowBitAdamW)
    assert expected[-1] < 0.1 * expected[0]
    assert found[-1] == pytest.approx(expected[-1], rel=0.1)
    assert found == pytest.approx(expected, rel=0.1)


def test_8_bit_moments_take_a_byte_and_vectors_stay_exact():
    model = net()
    built = optimizer_of(model, state_dtype="int8")
    trained(model, built, steps=1)
    matrix, vector = built.state[model[0].weight], built.state[model[0].bias]
    assert (matrix["exp_avg"].dtype, matrix["exp_avg_sq"].dtype) == (torch.int8, torch.uint8)
    assert matrix["exp_avg_scale"].shape == (64, 1)  # 48 values in a row share a scale
    assert (vector["exp_avg"].dtype, vector["exp_avg"].shape) == (torch.float32, (64,))


def test_a_quantized_second_moment_decays_with_the_gradients():
    """With rounding to nearest, 0.999 of the moment would be the moment itself."""
    model = nn.Linear(256, 4, bias=False)
    for state_dtype in ("bfloat16", "int8"):
        built = optimizer_of(model, state_dtype=state_dtype)
        for step in range(300):
            model.weight.grad = torch.ones_like(model.weight) if step == 0 else torch.full_like(model.weight, 1e-3)
            built.step()
        first, second = low_bit._moments(built.state[model.weight])
        assert second.mean().item() == pytest.approx(1e-3 * 0.999**299, rel=0.02), state_dtype
        assert first.mean().item() == pytest.approx(1e-3, rel=0.02), state_dtype


def test_bfloat16_weights_accumulate_updates_smaller_than_their_last_place():
    def moved(**section):
        model = nn.Linear(256, 16, bias=False).to(torch.bfloat16)
        torch.nn.init.ones_(model.weight)
        built = optimizer_of(model, **section)
        for step in range(100):
            begin_step(built, step=step, learning_rate=1e-4)  # a fortieth of the last place
            built.param_groups[0]["weight_decay"] = 0.0
            model.weight.grad = torch.ones_like(model.weight)
            built.step()
        return 1.0 - model.weight.float().mean().item()

    assert moved() == 0.0
    assert moved(stochastic_rounding=True) == pytest.approx(100 * 1e-4, rel=0.05)
    assert moved(stochastic_rounding=True, state_dtype="int8") == pytest.approx(100 * 1e-4, rel=0.05)


def test_rounding_depends_on_seed_and_not_on_chunks(monkeypatch):
    def weights(seed):
        model = net(torch.bfloat16)
        trained(model, optimizer_of(model, stochastic_rounding=True, state_dtype="int8", seed=seed), steps=3)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    once = weights(1)
    monkeypatch.setitem(low_bit._CHUNK, "cpu", 100)
    assert torch.equal(weights(1), once)
    assert not torch.equal(weights(2), once)


def test_weights_with_another_memory_order_are_updated_equally():
    plain, ours = net(), net()
    ours[0].weight.data = ours[0].weight.data.t().contiguous().t()
    expected = trained(plain, optimizer_of(plain, state_dtype="int8"), steps=3)
    assert not ours[0].weight.is_contiguous()
    assert trained(ours, optimizer_of(ours, state_dtype="int8"), steps=3) == pytest.approx(expected, rel=1e-6)


def test_low_bit_adamw_is_used_only_if_values_are_rounded():
    assert not uses_low_bit_adamw(OptimizerSection(), dtype="bfloat16")
    assert not uses_low_bit_adamw(OptimizerSection(state_dtype="float32"), dtype="float32")
    assert uses_low_bit_adamw(OptimizerSection(state_dtype="float32"), dtype="bfloat16")
    assert isinstance(optimizer_of(net(), state_dtype="float32"), torch.optim.AdamW)


def tensors_of(model, built):
    return [parameter.detach().clone() for parameter in model.parameters()] + [
        value.clone() for parameter in model.parameters() for value in built.state[parameter].values()
    ]


FLAGGED = [
    {"state_dtype": "int8"},
    {"state_dtype": "bfloat16"},
    {"stochastic_rounding": True, "state_dtype": "float32"},
]


@pytest.mark.parametrize("section", FLAGGED, ids=str)
def test_step_counts_on_device_and_host_give_equal_updates(section):
    """With `found_inf`, the host does not know the number of updates."""
    plain, flagged = net(torch.bfloat16), net(torch.bfloat16)
    one, other = optimizer_of(plain, **section), optimizer_of(flagged, **section)
    other.found_inf = torch.zeros(())
    assert trained(plain, one, steps=4) == trained(flagged, other, steps=4)
    assert all(map(torch.equal, tensors_of(plain, one), tensors_of(flagged, other)))


@pytest.mark.parametrize("section", FLAGGED, ids=str)
def test_a_skipped_update_changes_nothing_and_is_not_counted(section):
    model = net(torch.bfloat16)
    built = optimizer_of(model, **section)
    trained(model, built, steps=2)
    before = tensors_of(model, built)
    built.found_inf = torch.ones(())
    trained(model, built, first=2, steps=3)
    assert supports_found_inf(built, device=CPU)
    assert all(map(torch.equal, tensors_of(model, built), before))
    assert built.state[model[0].weight]["step"].item() == 2


def test_a_gradient_that_a_scaler_has_not_divided_is_divided():
    plain, scaled = net(), net()
    one, other = optimizer_of(plain, state_dtype="int8"), optimizer_of(scaled, state_dtype="int8")
    other.found_inf, other.grad_scale = torch.zeros(1), torch.tensor(4.0)
    for model, optimizer, factor in ((plain, one, 1.0), (scaled, other, 4.0)):
        (factor * model(ROWS).square().mean()).backward()
        optimizer.step()
    assert all(map(torch.equal, plain.parameters(), scaled.parameters()))


def test_rounding_follows_the_step_of_the_run_so_a_skipped_one_makes_no_difference_between_devices():
    model = net(torch.bfloat16)
    built = optimizer_of(model, stochastic_rounding=True)
    begin_step(built, step=6, learning_rate=0.1)
    assert {group[low_bit.ROUNDING_STEP] for group in built.param_groups} == {7}
