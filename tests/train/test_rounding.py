"""Rounding by chance: right on average, the same for the same place, whatever is around it."""

import pytest
import torch

from finetune.train.rounding import POSITIVE, SIGNED, chances, high_half, low_half, to_bfloat16

CPU = torch.device("cpu")


def drawn(key, count=4096):
    return chances(0, count, key=key, device=CPU)


def test_the_chance_of_a_place_does_not_depend_on_what_is_drawn_with_it():
    assert torch.equal(chances(100, 200, key=7, device=CPU), drawn(7)[100:200])
    assert not torch.equal(drawn(7), drawn(8))
    assert chances(2**32 + 5, 2**32 + 6, key=7, device=CPU).dtype == torch.int32


def test_chances_are_spread_evenly_and_do_not_follow_each_other():
    share = (drawn(7, 1 << 16).to(torch.int64) & 0xFFFFFFFF).double() / 2**32
    assert share.mean().item() == pytest.approx(0.5, abs=0.005)
    assert share.var().item() == pytest.approx(1 / 12, rel=0.02)
    assert abs(torch.corrcoef(torch.stack([share[:-1], share[1:]]))[0, 1].item()) < 0.02


@pytest.mark.parametrize("half", [low_half, high_half])
def test_a_value_between_two_of_bfloat16_becomes_either_in_proportion(half):
    values = torch.full((4096,), 1.0 + 2**-7 / 4)  # a quarter of the way from 1 to the next number
    rounded = to_bfloat16(values, half(drawn(3)))
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert (rounded > 1).double().mean().item() == pytest.approx(0.25, abs=0.03)


def test_what_bfloat16_can_hold_stays_what_it_is():
    values = torch.tensor([0.0, 1.0, -2.5, 2.0**-100]).repeat(1024)
    assert torch.equal(to_bfloat16(values, low_half(drawn(3))).float(), values)


@pytest.mark.parametrize(("coding", "values"), [(SIGNED, torch.randn), (POSITIVE, torch.rand)])
def test_8_bits_are_near_and_right_on_average(coding, values):
    torch.manual_seed(0)
    wanted = values(16, 256)
    scales = wanted.abs().amax(dim=1, keepdim=True)
    found = [
        coding.decode(coding.encode(wanted, scales, low_half(drawn(key)).view(16, 256) * 2.0**-16), scales)
        for key in range(200)
    ]
    assert ((found[0] - wanted).abs() / scales).max() < 0.04
    mean = torch.stack(found).mean(dim=0)
    assert ((mean - wanted).abs() / scales).mean() < 0.002
    assert ((mean - wanted) / scales).mean().abs() < 0.0005


def test_a_small_value_beside_a_large_one_is_kept():
    wanted = torch.tensor([[1.0, 1e-6]])
    codes = POSITIVE.encode(wanted, torch.ones(1, 1), torch.full((1, 2), 0.5))
    assert POSITIVE.decode(codes, torch.ones(1, 1))[0, 1].item() == pytest.approx(1e-6, rel=0.2)
    assert codes.dtype == torch.uint8


def test_a_block_of_zeros_is_zeros():
    zeros = torch.zeros(1, 256)
    assert not SIGNED.decode(SIGNED.encode(zeros, zeros[:, :1], torch.rand(1, 256)), zeros[:, :1]).any()
