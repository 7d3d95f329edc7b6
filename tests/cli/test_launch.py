"""`finetune launch slurm`, `kubernetes`, `skypilot` and `next`, as they are typed."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from finetune.cli import launch
from finetune.commands.launch.job_files import Destination, JobFileArguments
from finetune.commands.launch.kubernetes import KubernetesArguments
from finetune.commands.launch.skypilot import SkypilotArguments
from finetune.commands.launch.slurm import SlurmArguments

ACCELERATE = Path(__file__).parents[2] / "accelerate_configs" / "ddp.yaml"
COMMANDS = {launch.slurm: SlurmArguments, launch.kubernetes: KubernetesArguments, launch.skypilot: SkypilotArguments}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_taken_by_one_record_and_none_is_ignored(command):
    shared = {field.name for record in (JobFileArguments, Destination) for field in fields(record)}
    own = {field.name for field in fields(COMMANDS[command])}
    options = inspect.signature(command).parameters
    assert not shared & own and own - {"min_nodes"} <= options.keys() <= shared | own  # of `--nodes MIN:MAX`
    assert shared - options.keys() == {"elsewhere", "suffix", "command", "advice"}


@pytest.fixture
def words(job: Path) -> list[str]:
    """The words of a job that is checked: 8 samples a step for 2 x 1 processes of 4 samples."""
    return ["--config", str(job), "--accelerate", str(ACCELERATE), "--nodes", "2", "--gpus-per-node", "1"]


def test_command_line_options_are_written_into_the_job_file(typed, words, monkeypatch):
    monkeypatch.setattr("finetune.commands.launch.job_files._LOCAL_FOLDERS", ("/no/such",))  # the job is in /tmp
    url = ["--set", "run.folder=s3://bucket/run", "--log-folder", "/shared/logs", "--set", "run.local_folder=/shared/x"]
    code, out, _ = typed("launch", "slurm", *words, *url, "--partition", "gpu", "--time", "1:00:00", "--env", "A=b c")
    assert code == 0 and "#SBATCH --partition=gpu\n" in out and "export A='b c'\n" in out
    assert "--local-folder /shared/x" in out and "logs=/shared/logs\n" in out


def test_a_ray_job_takes_a_range_of_hosts(typed, words):
    kubernetes = ("kubernetes", *words, "--image", "i", "--nodes", "1:2", "--claim", "c:/data")
    kubernetes += ("--set", "run.folder=/data/r")
    code, out, _ = typed("launch", *kubernetes, "--in-image", Path(words[1]).parent, "--ray")
    assert code == 0 and "kind: RayJob" in out and "--nodes 1:2" in out
    code, _, err = typed("launch", *kubernetes, "--in-image", Path(words[1]).parent)
    assert code == 2 and "--nodes MIN:MAX, --redis and --redis-secret are for a RayJob" in err


def test_options_of_a_ray_job_need_submit(typed, words):
    for option in (("--detach",), ("--working-dir", "/")):
        code, out, err = typed("launch", "ray", *words, *option)
        assert (code, out) == (2, "") and "--detach and --working-dir are for a Ray job: add --submit" in err


def test_mistakes_end_with_2_and_one_message(typed, words):
    for more, message in (
        (("slurm",), "run.folder: /tmp/"),
        (("slurm", "--env", "A"), "--env A: write NAME=VALUE"),
        (("slurm", "--set", "train.global_batch_size=7"), "train.global_batch_size"),
        (("kubernetes", "--image", "i"), "run.folder: "),
        (("skypilot", "--gpu", "H100"), "run.folder: "),
    ):
        code, out, err = typed("launch", more[0], *words, *more[1:])
        assert (code, out) == (2, "") and message in err and "Traceback" not in err


def test_next_answers_with_its_exit_code(typed, tmp_path):
    run = tmp_path / "run"
    for code, expected in ((0, 0), (2, 2), (1, 75), (143, 1)):
        answer = typed("launch", "next", "--run", run, "--since", 0, "--exit-code", code, "--max-restarts", 1)
        assert answer[0] == expected and answer[1].startswith(
            ("finetune: the job is over", "finetune: restart the job")
        )
