import time

import pytest
import typer

from finetune.cli.exit_codes import CommandGroup, guarded_command_line
from finetune.errors import CheckpointError, ConfigError, NonFiniteError, Problem, TrainingError


def ended(error: BaseException | None = None, *, code: int | None = None) -> int:
    """Return the exit code of a command that raises or returns."""

    def command() -> int | None:
        if error is not None:
            raise error
        return code

    app = typer.Typer(cls=CommandGroup, callback=lambda: None)
    app.command("run")(command)
    with pytest.raises(SystemExit) as exited:
        app(["run"])
    return int(exited.value.code or 0)


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (1, 1), (143, 143)])
def test_a_command_ends_with_its_own_code(code, exit_code):
    assert ended(code=code) == exit_code


def test_a_user_error_exits_with_code_2_and_one_message(capsys):
    assert ended(CheckpointError("no checkpoint in runs/first")) == 2
    assert capsys.readouterr().err == "error: no checkpoint in runs/first\n"


def test_a_run_that_went_wrong_is_exit_code_1(capsys):
    assert ended(NonFiniteError("step 4: the loss is NaN")) == 1
    assert capsys.readouterr().err == "error: step 4: the loss is NaN\n"


def test_ctrl_c_is_exit_code_130_and_one_line(capsys):
    assert ended(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        ended(ZeroDivisionError())


def test_a_refusal_is_printed_by_rank_0_and_by_other_ranks_only_if_they_are_still_running(monkeypatch, capsys):
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    error = ConfigError([Problem("train.steps", "is wrong.", line=3)], "job.yaml")
    assert ended(error) == 2
    assert waited == []
    monkeypatch.setenv("RANK", "3")
    assert ended(error) == 2
    assert len(waited) == 1
    printed = "error: job.yaml has 1 problem\n  line 3, train.steps: is wrong.\n"
    assert capsys.readouterr().err == f"{printed}[rank 3] {printed}"


def test_a_failure_of_training_is_printed_at_once_by_every_rank(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert ended(TrainingError("a shard is missing")) == 1
    assert capsys.readouterr().err == "[rank 3] error: a shard is missing\n"


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"])
def test_the_message_under_a_launcher_advises_ignoring_the_launchers_traceback(monkeypatch, capsys, variable):
    monkeypatch.setenv(variable, "1")
    assert ended(CheckpointError("no checkpoint in runs/first")) == 2
    assert capsys.readouterr().err.endswith("Ignore the launcher's traceback below: it only reports this exit.\n")
    assert ended(TrainingError("a shard is missing")) == 1
    assert "Ignore" not in capsys.readouterr().err


def test_the_message_under_the_own_launcher_is_all(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "finetune-123")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert ended(CheckpointError("no checkpoint in runs/first")) == 2
    assert capsys.readouterr().err == "error: no checkpoint in runs/first\n"


@pytest.mark.parametrize(
    "text",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "[enforce fail at inline_container.cc:815] . PytorchStreamWriter failed writing file data/3: file write failed",
        "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0",
    ],
)
def test_a_full_disk_is_one_message_for_every_library_error_text(text, capsys):
    with pytest.raises(SystemExit) as ended, guarded_command_line():
        raise RuntimeError(text)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the disk is full (No space left on device). Make room.\n"
