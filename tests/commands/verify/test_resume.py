"""The verdict on a resume: other samples, another loss, another state or another start are each named."""

from dataclasses import replace
from pathlib import Path

import pytest

from finetune.commands.verify.resume import LossHistory, RecordedStep, differences, run_resume
from finetune.commands.verify.runs import LaunchSetup, parse_launch_setup
from finetune.config.load import load_config
from finetune.errors import UserError

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
STRAIGHT = LossHistory(
    (RecordedStep(1, "a", 4.0), RecordedStep(2, "b", 3.0), RecordedStep(3, "c", 2.0)), starts=(0,), state_sha256="f0"
)
RESUMED = replace(STRAIGHT, starts=(0, 2))


def told(resumed, *, tolerance):
    return list(differences(STRAIGHT, resumed, stop_at=2, tolerance=tolerance))


def with_step(number, **changes):
    changed = [replace(step, **changes) if step.number == number else step for step in STRAIGHT.steps]
    return replace(RESUMED, steps=tuple(changed))


def test_the_same_course_is_equal():
    assert told(RESUMED, tolerance=None) == []


def test_the_last_bit_counts_under_the_same_strategy_only():
    nearly = with_step(3, loss=2.0000000000000004)
    assert told(nearly, tolerance=None) == ["another loss at step 3"]
    assert told(nearly, tolerance=1e-4) == []


def test_a_loss_that_is_not_a_number_is_never_equal():
    assert told(with_step(3, loss=float("nan")), tolerance=1e-4) == ["another loss at step 3"]


def test_other_samples_are_never_within_the_tolerance():
    assert told(with_step(2, samples="x"), tolerance=1e-4) == ["other samples from step 2 on"]


def test_another_state_counts_under_the_same_strategy_only():
    other = replace(RESUMED, state_sha256="f1")
    assert told(other, tolerance=None) == ["another state in the last checkpoint"]
    assert told(other, tolerance=1e-4) == []


def test_a_run_that_began_anew_is_not_a_resumed_one():
    assert told(replace(RESUMED, starts=(0, 0)), tolerance=1e-4) == ["the second start went on from step 0, not 2"]


def test_fewer_steps_are_a_difference():
    assert told(replace(RESUMED, steps=STRAIGHT.steps[:2]), tolerance=1e-4) == ["straight took 3 steps, resumed 2"]


def test_the_jobs_microbatch_is_kept_where_the_processes_can_share_it(job):
    config = load_config(job).config  # 8 per step in microbatches of 4
    one, two, four = (
        parse_launch_setup(f"ddp:{world}", config, processes=2, folder=CONFIGS, option="--from") for world in (1, 2, 4)
    )
    assert [each.accumulation for each in (one, two, four)] == [2, 1, 1]
    assert four == LaunchSetup("ddp", CONFIGS / "ddp.yaml", 4, 1)
    assert one.title == "ddp:1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "zero9:2"}, "--to zero9: there is no"),
        ({"source": "ddp:3"}, "--from ddp:3: a global batch of 8 cannot be shared by 3 processes"),
        ({"source": "ddp:two"}, "--from ddp:two: write the number of processes"),
        ({"steps": 3}, "nothing is left to compare after --stop-at 3"),
        ({"stop_at": 10}, "the job takes only 10 steps"),
    ],
)
def test_a_mistake_is_told_before_anything_is_started(job, changes, message):
    asked = {"stop_at": 3, "steps": None, "source": "ddp:2", "target": "zero3:4", **changes}
    with pytest.raises(UserError, match=message):
        run_resume(job, overrides=[], tolerance=1e-4, configs_folder=CONFIGS, **asked)
