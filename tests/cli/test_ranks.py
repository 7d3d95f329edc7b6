"""Which commands take the ranks of `srun` for their own."""

import os

import pytest

from finetune.cli.after_training import evaluate, generate
from finetune.cli.app import check, train
from finetune.cli.before_training import doctor
from finetune.cli.exit_codes import with_ranks
from finetune.cli.launch import sweep, torchrun
from finetune.errors import UserError
from tests.launch.test_ranks import ON_ONE_HOST


@pytest.fixture
def step(monkeypatch):
    """The variables of a task of `srun`; what a command sets is undone."""
    before = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ON_ONE_HOST.items():
        monkeypatch.setenv(name, value)
    yield monkeypatch
    os.environ.clear()
    os.environ.update(before)


@with_ranks
def show(*names: str) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def test_a_command_runs_with_the_ranks_of_its_task_and_rank_0_prints_them(step, capsys):
    assert show("RANK", "WORLD_SIZE", "MASTER_ADDR") == ["1", "4", "127.0.0.1"]
    assert capsys.readouterr().err == ""
    del os.environ["RANK"]
    step.setenv("SLURM_PROCID", "0")
    assert show("RANK") == ["0"]
    assert capsys.readouterr().err.startswith("4 processes by srun (step 200505.3); rank 0 is at 127.0.0.1:")


def test_variables_that_contradict_each_other_are_the_users_to_fix(step):
    step.setenv("SLURM_NODEID", "2")
    with pytest.raises(UserError, match="SLURM_NODEID=2"):
        show("RANK")


def test_commands_that_are_one_of_several_processes_take_ranks_and_those_that_start_processes_do_not():
    assert all(hasattr(each, "__wrapped__") for each in (train, evaluate, generate, doctor, sweep))
    assert not any(hasattr(each, "__wrapped__") for each in (check, torchrun))
