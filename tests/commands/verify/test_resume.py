"""The verdict on a resume: other samples, another loss, another state or another start are each named."""

from dataclasses import replace
from pathlib import Path

import pytest

from finetune.commands.verify.runs import CompletedRun, LaunchSetup, parse_launch_setup, run_differences, run_resume
from finetune.config.load import load_config
from finetune.errors import UserError
from finetune.report.history import Steps

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
SAMPLES, LOSSES = ("aa", "bb", "cc"), (4.0, 3.0, 2.0)


def steps(samples=SAMPLES, losses=LOSSES):
    history = Steps()
    for number, (digest, loss) in enumerate(zip(samples, losses, strict=True), start=1):
        history.add({"step": number, "samples_sha256": digest, "loss": loss})
    return history


STRAIGHT = CompletedRun(steps(), starts=(0,), state_sha256="f0")
RESUMED = replace(STRAIGHT, starts=(0, 2))


ANEW, SHORTER = "the second start resumed from step 0, not 2", "straight took 3 steps, resumed 2"
NEARLY = steps(losses=(4.0, 3.0, 2.0000000000000004))


@pytest.mark.parametrize(
    ("changes", "exactly", "within_tolerance"),
    [
        ({}, [], []),
        ({"steps": NEARLY}, ["another loss at step 3"], []),
        ({"steps": steps(losses=(4.0, 3.0, float("nan")))}, ["another loss at step 3"], ["another loss at step 3"]),
        (
            {"steps": steps(samples=("aa", "bc", "cc"))},
            ["other samples from step 2 on"],
            ["other samples from step 2 on"],
        ),
        ({"state_sha256": "f1"}, ["another state in the last checkpoint"], []),
        ({"starts": (0, 0)}, [ANEW], [ANEW]),
        ({"steps": steps(SAMPLES[:2], LOSSES[:2])}, [SHORTER], [SHORTER]),
    ],
)
def test_each_difference_counts_and_rounding_only_without_a_tolerance(changes, exactly, within_tolerance):
    for tolerance, expected in ((None, exactly), (1e-4, within_tolerance)):
        resumed = replace(RESUMED, **changes)
        assert list(run_differences(STRAIGHT, resumed, stop_at=2, tolerance=tolerance)) == expected


def test_the_microbatch_size_of_the_job_is_kept_where_the_processes_can_share_it(job):
    config = load_config(job).config  # 8 per step in microbatches of 4
    one, two, four = (
        parse_launch_setup(f"ddp:{world}", config, processes=2, folder=CONFIGS, option="--from") for world in (1, 2, 4)
    )
    assert [setup.accumulation for setup in (one, two, four)] == [2, 1, 1]
    assert four == LaunchSetup("ddp", CONFIGS / "ddp.yaml", 4, 1)
    assert one.title == "ddp:1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "zero9:2"}, "--to zero9: `zero9` is neither a file nor a known name"),
        ({"source": "ddp:3"}, "--from ddp:3: a global batch of 8 cannot be shared by 3 processes"),
        ({"source": "ddp:two"}, "--from ddp:two: write the number of processes"),
        ({"steps": 3}, "nothing is left to compare after --stop-at 3"),
        ({"stop_at": 10}, "the job takes only 10 steps"),
    ],
)
def test_wrong_options_are_refused_before_any_run_starts(job, changes, message):
    asked = {"stop_at": 3, "steps": None, "source": "ddp:2", "target": "zero3:4", **changes}
    with pytest.raises(UserError, match=message):
        run_resume(job, overrides=[], tolerance=1e-4, configs_folder=CONFIGS, **asked)
