"""`finetune launch slurm`, `kubernetes` and `next`, as they are typed."""

import inspect
from dataclasses import fields
from pathlib import Path

import pytest

from finetune.cli import launch
from finetune.commands.launch.job_files import JobFileArguments
from finetune.commands.launch.kubernetes import KubernetesArguments
from finetune.commands.launch.ray import RayArguments
from finetune.commands.launch.slurm import SlurmArguments
from finetune.commands.sweep.sweep import SweepRequest

ACCELERATE = Path(__file__).parents[2] / "accelerate_configs" / "ddp.yaml"


@pytest.mark.parametrize(
    ("command", "records"),
    [
        (launch.slurm, (JobFileArguments, SlurmArguments)),
        (launch.kubernetes, (JobFileArguments, KubernetesArguments)),
        (launch.ray, (RayArguments,)),
        (launch.sweep, (SweepRequest,)),
    ],
)
def test_every_option_is_taken_by_one_record_and_none_is_ignored(command, records):
    names = [field.name for record in records for field in fields(record) if field.name != "elsewhere"]
    assert sorted(inspect.signature(command).parameters) == sorted(names)


@pytest.fixture
def words(job: Path) -> list[str]:
    """The words of a job that is checked: 8 samples a step for 2 x 1 processes of 4 samples."""
    return ["--config", str(job), "--accelerate", str(ACCELERATE), "--nodes", "2", "--gpus-per-node", "1"]


def test_command_line_options_are_written_into_the_job_file(typed, words, monkeypatch):
    monkeypatch.setattr("finetune.commands.launch.job_files._LOCAL_FOLDERS", ("/no/such",))  # the job is in /tmp
    url = ["--set", "run.folder=s3://bucket/run", "--set", "run.local_folder=/shared/x"]
    code, out, _ = typed("launch", "slurm", *words, *url, "--partition", "gpu", "--time", "1:00:00", "--env", "A=b c")
    assert code == 0 and "#SBATCH --partition=gpu\n" in out and "export A='b c'\n" in out
    assert "--local-folder /shared/x" in out


def test_mistakes_end_with_2_and_one_message(typed, words):
    for more, message in (
        (("slurm",), "run.folder: /tmp/"),
        (("slurm", "--env", "A"), "--env A: write NAME=VALUE"),
        (("slurm", "--set", "train.global_batch_size=7"), "train.global_batch_size"),
        (("kubernetes", "--image", "i"), "run.folder: "),
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
