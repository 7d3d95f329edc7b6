"""The step plan is derived from the budget and described; the learning rate is a function of the steps taken."""

import math

import pytest

from finetune.config.sections.train import ScalingSection, ScheduleSection, TrainSection
from finetune.train.plan import build_schedule, make_step_plan, scaled_learning_rate


def plan(world=4, num_positions=1000, unit="samples", sequence_size=1, **changes):
    section = TrainSection(**{"global_batch_size": 64, "microbatch_size": 4, "learning_rate": 1e-3, **changes})
    return make_step_plan(
        section,
        num_positions=num_positions,
        unit=unit,
        world=world,
        steps_for_tokens=lambda tokens: tokens // 10_000,
        sequence_size=sequence_size,
    )


def test_accumulation_is_derived_from_batch_and_world():
    made = plan(steps=10)
    assert made.num_batches == 4
    assert made.arithmetic[0] == "batch: 64 = 4 processes x 4 per microbatch x 4 accumulated"


def test_ranks_that_share_rows_take_microbatches_together():
    made = plan(world=8, sequence_size=4, steps=10)
    assert made.num_batches == 8
    assert made.arithmetic[0] == "batch: 64 = 8 processes / 4 that share each row x 4 per microbatch x 8 accumulated"
    assert made.with_microbatch_size(16).num_batches == made.num_batches_of(16) == 2


def test_the_world_changes_accumulation_and_nothing_else():
    assert [plan(world=world, epochs=2.0).num_steps for world in (1, 2, 4, 16)] == [32] * 4
    assert [plan(world=world, epochs=2.0).num_batches for world in (1, 2, 4, 16)] == [16, 8, 4, 1]


def test_epochs_become_whole_steps_and_the_remainder_is_logged():
    made = plan(epochs=3.0)
    assert made.num_steps == 47
    assert made.arithmetic[1] == (
        "budget: 3 epochs x 1,000 samples / 64 = 46.88 -> 47 steps; the last one takes 8 samples from the next epoch"
    )
    assert made.epoch(47) == pytest.approx(3.008)


def test_a_token_budget_becomes_steps_by_the_data():
    made = plan(tokens=120_000)
    assert made.num_steps == 12
    assert "120,000 tokens are reached in 12 steps" in made.arithmetic[1]


def test_the_plan_counts_packs_as_its_unit():
    made = plan(epochs=1.0, num_positions=128, unit="packs")
    assert made.arithmetic[1] == "budget: 1 epoch x 128 packs / 64 = 2.00 -> 2 steps"


def test_a_stream_has_steps_and_no_epoch():
    made = plan(steps=10, num_positions=None)
    assert made.arithmetic[1] == "budget: 10 steps x 64 samples of a stream"
    assert made.epoch(5) is None


def test_a_scaled_learning_rate_is_described_with_its_formula():
    made = plan(steps=10, learning_rate_scaling=ScalingSection(rule="linear", base_global_batch_size=32))
    assert made.schedule.peak == pytest.approx(2e-3)
    assert "0.002 = 0.001 x (64 / 32)" in made.arithmetic[2]


@pytest.mark.parametrize(
    ("every_steps", "after", "times"),
    [(4, 0, 3), (4, 4, 2), (4, 8, 1), (4, 10, 0), (5, 0, 2), (None, 9, 1), (None, 10, 0)],
)
def test_a_cadence_is_due_every_n_steps_and_at_the_end(every_steps, after, times):
    assert plan(steps=10).num_due(every_steps, after=after) == times


def rates(section, num_steps):
    schedule = build_schedule(section, peak=1.0, num_steps=num_steps)
    return [round(schedule.learning_rate(step), 4) for step in range(num_steps)]


WARM = "warmup_stable_decay"


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"name": "linear", "warmup_steps": 2}, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ({"name": "cosine"}, [round(0.5 * (1 + math.cos(math.pi * step / 8)), 4) for step in range(8)]),
        ({"name": WARM, "warmup_fraction": 0.1, "decay_fraction": 0.2}, [1.0] * 9 + [0.5]),
        ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ],
    ids=["linear", "cosine", WARM, "constant"],
)
def test_a_schedule_has_its_shape(section, expected):
    assert rates(ScheduleSection(**section), len(expected)) == expected


def test_the_schedule_ends_at_its_final_fraction():
    schedule = build_schedule(ScheduleSection(name="linear", final_fraction=0.1), peak=2.0, num_steps=10)
    assert schedule.learning_rate(10) == pytest.approx(0.2)


def test_scaling_rules():
    assert scaled_learning_rate(1e-3, None, global_batch_size=64) == 1e-3
    linear = ScalingSection(rule="linear", base_global_batch_size=16)
    assert scaled_learning_rate(1e-3, linear, global_batch_size=64) == pytest.approx(4e-3)
    root = ScalingSection(rule="square_root", base_global_batch_size=16)
    assert scaled_learning_rate(1e-3, root, global_batch_size=64) == pytest.approx(2e-3)
