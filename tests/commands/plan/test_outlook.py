"""Hours, dollars and checkpoints of a plan, by hand from its step time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.commands.plan.output import Plan

Planned = Callable[..., Plan]


def test_hours_and_dollars_follow_from_the_step(planned: Planned, tmp_path: Path):
    """1,000 steps on 8 GPUs at 2 dollars each an hour; on demand, failures add next to nothing to an hour or two."""
    prices = tmp_path / "prices.yaml"
    prices.write_text("H100: {us: {on_demand: 2.0, spot: 1.0}, them: {on_demand: 1.5}}\n")
    on_demand = planned("8b", gpus="8xH100", prices=prices).machines[0].outlook
    spot = planned("8b", gpus="8xH100", prices=prices, hours_between_preemptions=24.0).machines[0].outlook
    assert on_demand is not None and spot is not None and on_demand.hours is not None
    assert on_demand.hours == pytest.approx(1000 * on_demand.step_seconds / 3600, rel=2e-3)
    assert on_demand.tokens_per_second == pytest.approx(64 * 4096 / on_demand.step_seconds)
    assert [offer.provider for offer in on_demand.offers] == ["them", "us"]
    own, (other,) = on_demand.offers[1], spot.offers
    assert own.usd == pytest.approx(on_demand.hours * 16.0) and other.usd is not None
    assert on_demand.hours * 8.0 < other.usd < on_demand.hours * 8.0 * 1.05
    assert own.usd_per_million_tokens == pytest.approx(own.usd / (1000 * 64 * 4096) * 1e6, rel=1e-6)


def test_a_checkpoint_holds_trained_weights_and_moments(planned: Planned):
    """12 bytes for each of 8.03 billion: 96 GB, copied by eight ranks over half of PCIe, 63 GB/s: 0.38 s."""
    on_demand, spot = (
        planned("8b", gpus="8xH100", hours_between_preemptions=hours).machines[0].outlook for hours in (None, 24.0)
    )
    assert on_demand is not None and spot is not None
    assert spot.checkpoints.size_bytes == 12 * 8_030_000_000
    assert spot.checkpoints.stall_seconds == pytest.approx(12 * 8.03e9 / 8 / 31.5e9)
    assert spot.checkpoints.hours_between_failures == 24.0
    assert on_demand.checkpoints.hours_between_failures == 50_000 / 8
    assert spot.checkpoints.interval_seconds == 300.0, "Daly's 256 s would save more often than is of use"
    assert spot.checkpoints.every_steps == round(300.0 / spot.step_seconds)


def test_plan_without_a_number_of_steps_prices_only_tokens(planned: Planned):
    plan = planned("8b", "train.steps=null", "train.epochs=1", gpus="8xH100")
    outlook = plan.machines[0].outlook
    assert outlook is not None and outlook.hours is None
    assert outlook.offers and all(each.usd is None and each.usd_per_million_tokens > 0 for each in outlook.offers)
    assert any("is unknown until `finetune prepare`" in sentence for sentence in plan.assumptions)


def test_a_budget_in_tokens_gives_steps(planned: Planned):
    outlook = planned("8b", "train.steps=null", "train.tokens=262144000", gpus="8xH100").machines[0].outlook
    assert outlook is not None and outlook.num_steps == 1000


def test_a_job_that_is_preempted_before_it_has_restarted_never_ends(planned: Planned):
    outlook = planned("8b", gpus="8xH100", hours_between_preemptions=0.0001).machines[0].outlook
    assert outlook is not None and outlook.num_steps == 1000
    assert (outlook.hours, outlook.offers) == (None, ())
