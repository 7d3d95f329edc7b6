"""How many GPUs pay."""

import pytest

from finetune.commands.plan.outlook import ScalePoint, amdahl_share, efficiency, most_that_pay


def amdahl(serial: float, *numbers: int) -> list[ScalePoint]:
    """Points that follow Amdahl's law with this serial share, at 100 tokens/s on one GPU."""
    return [ScalePoint(each, 100.0 / (serial + (1 - serial) / each), usd_per_gpu_hour=2.0) for each in numbers]


def test_amdahls_law_by_hand():
    """With a tenth that is serial, 10 GPUs are 1 / (0.1 + 0.09) = 5.26 times as fast: 52.6% each (Amdahl, 1967)."""
    points = amdahl(0.1, 1, 10)
    assert efficiency(points)[1] == pytest.approx(1 / 1.9)
    assert amdahl_share(points) == pytest.approx(0.1)
    assert amdahl_share(points[:1]) is None


def test_the_number_that_pays_is_the_last_that_is_efficient():
    """With 5% serial: 2 GPUs 95%, 4 GPUs 87%, 8 GPUs 74%."""
    points = amdahl(0.05, 1, 2, 4, 8)
    assert [round(share, 2) for share in efficiency(points)] == [1.0, 0.95, 0.87, 0.74]
    assert most_that_pay(points).num_gpus == 4
    assert most_that_pay(points, least=0.7).num_gpus == 8


def test_tokens_per_dollar():
    """360 tokens/s for a GPU at 2 dollars an hour: 648,000 tokens per dollar."""
    assert ScalePoint(1, 360.0, usd_per_gpu_hour=2.0).tokens_per_usd == 648_000.0
    assert ScalePoint(1, 360.0).tokens_per_usd is None
