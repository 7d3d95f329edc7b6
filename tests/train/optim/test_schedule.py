"""The learning rate is a function of the number of steps taken."""

import math

import pytest

from finetune.config.sections.train import ScalingSection, ScheduleSection
from finetune.train.optim.schedule import build_schedule, scaled_learning_rate


def rates(section, num_steps):
    schedule = build_schedule(section, peak=1.0, num_steps=num_steps)
    return [round(schedule.learning_rate(step), 4) for step in range(num_steps)]


def test_the_linear_schedule_rises_and_falls_in_straight_lines():
    assert rates(ScheduleSection(name="linear", warmup_steps=2), 6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_the_cosine_schedule_is_at_half_in_the_middle():
    falling = rates(ScheduleSection(name="cosine"), 8)
    assert falling[0] == 1.0
    assert falling[4] == 0.5
    assert falling[6] == pytest.approx(0.5 * (1 + math.cos(math.pi * 6 / 8)), abs=1e-4)


def test_warmup_stable_decay_holds_the_peak_until_the_last_fifth():
    section = ScheduleSection(name="warmup_stable_decay", warmup_fraction=0.1, decay_fraction=0.2)
    assert rates(section, 10) == [1.0] * 9 + [0.5]


def test_constant_stays_after_its_warmup():
    assert rates(ScheduleSection(name="constant", warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_schedule_ends_at_its_final_fraction():
    schedule = build_schedule(ScheduleSection(name="linear", final_fraction=0.1), peak=2.0, num_steps=10)
    assert schedule.learning_rate(10) == pytest.approx(0.2)


def test_scaling_rules():
    assert scaled_learning_rate(1e-3, None, global_batch_size=64) == 1e-3
    linear = ScalingSection(rule="linear", base_global_batch_size=16)
    assert scaled_learning_rate(1e-3, linear, global_batch_size=64) == pytest.approx(4e-3)
    root = ScalingSection(rule="square_root", base_global_batch_size=16)
    assert scaled_learning_rate(1e-3, root, global_batch_size=64) == pytest.approx(2e-3)
