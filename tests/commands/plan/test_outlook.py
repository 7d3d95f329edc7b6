"""Hours, dollars and checkpoints of a plan, by hand from its step time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.plan.outlook import Assumed, ScalePoint, amdahl_share, efficiency, most_that_pay
from finetune.commands.plan.output import Plan

Planned = Callable[..., Plan]


def test_hours_and_dollars_follow_from_the_step(planned: Planned, tmp_path: Path):
    """1,000 steps on 8 GPUs at 2 dollars each an hour; on demand, failures add next to nothing to an hour or two."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("H100: {us: {on_demand: 2.0, spot: 1.0}}\n")
    outlook = planned("8b", gpus="8xH100", prices=prices).machines[0].outlook
    assert outlook is not None and outlook.hours is not None
    assert outlook.hours == pytest.approx(1000 * outlook.step_seconds / 3600)
    assert outlook.tokens_per_second == pytest.approx(64 * 4096 / outlook.step_seconds)
    own, spot = outlook.offers
    assert (own.is_spot, spot.is_spot) == (False, True)
    assert own.usd == pytest.approx(outlook.hours * 16.0, rel=2e-3)
    assert spot.usd is not None and outlook.hours * 8.0 < spot.usd < outlook.hours * 8.0 * 1.05
    assert own.usd_per_million_tokens == pytest.approx(own.usd / (1000 * 64 * 4096) * 1e6, rel=1e-6)


def test_a_checkpoint_holds_trained_weights_and_moments(planned: Planned):
    """12 bytes for each of 8.03 billion: 96 GB, copied by eight ranks over half of PCIe, 63 GB/s: 0.38 s."""
    outlook = planned("8b", gpus="8xH100").machines[0].outlook
    assert outlook is not None
    spot = outlook.saving_spot
    assert spot.size_bytes == 12 * 8_030_000_000
    assert spot.stall_seconds == pytest.approx(12 * 8.03e9 / 8 / 31.5e9)
    assert spot.hours_between_failures == 24.0
    assert outlook.saving_on_demand.hours_between_failures == 50_000 / 8
    assert spot.young_seconds == pytest.approx((2 * spot.stall_seconds * 24 * 3600) ** 0.5)
    assert spot.interval_seconds == 300.0, "Daly's 256 s would save more often than is of use"
    assert spot.every_steps == round(300.0 / outlook.step_seconds)


def test_plan_uses_the_given_preemption_rate_and_disk_speed(planned: Planned):
    assumed = Assumed(hours_between_preemptions=1.0, disk_bandwidth=0.2e9)
    outlook = planned("8b", gpus="8xH100", assumed=assumed).machines[0].outlook
    assert outlook is not None
    assert outlook.saving_spot.hours_between_failures == 1.0
    assert outlook.saving_spot.interval_seconds == pytest.approx(12 * 8.03e9 / 0.2e9), "what writing takes"


def test_plan_without_a_number_of_steps_prices_only_tokens(planned: Planned):
    plan = planned("8b", "train.steps=null", "train.epochs=1", gpus="8xH100")
    outlook = plan.machines[0].outlook
    assert outlook is not None and outlook.hours is None
    assert all(each.usd is None and each.usd_per_million_tokens > 0 for each in outlook.offers)
    assert any("is unknown until `finetune prepare`" in sentence for sentence in plan.assumptions)


def test_a_budget_in_tokens_gives_steps(planned: Planned):
    outlook = planned("8b", "train.steps=null", "train.tokens=262144000", gpus="8xH100").machines[0].outlook
    assert outlook is not None and outlook.num_steps == 1000


def test_twice_the_gpus_are_nearly_twice_as_fast_at_nearly_the_same_cost_per_token(planned: Planned):
    points = {each.num_gpus: each for each in planned("8b", gpus="8xH100").machines[0].points}
    assert list(points) == [2, 4, 8, 16, 32, 64], "64 samples: at most 64 GPUs; one GPU is too small"
    assert points[16].strategy == "hsdp" and points[8].strategy == "fsdp2"
    assert 1.8 < points[16].tokens_per_second / points[8].tokens_per_second <= 2.0
    assert points[16].tokens_per_usd is not None and points[8].tokens_per_usd is not None
    assert points[16].tokens_per_usd <= points[8].tokens_per_usd


def test_a_job_that_is_preempted_before_it_has_restarted_never_ends(planned: Planned):
    assumed = Assumed(hours_between_preemptions=0.001, restart_seconds=1e6)
    outlook = planned("8b", gpus="8xH100", assumed=assumed).machines[0].outlook
    spot = [offer for offer in outlook.offers if offer.is_spot]
    assert spot and all(offer.usd is offer.usd_per_million_tokens is None for offer in spot)


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
