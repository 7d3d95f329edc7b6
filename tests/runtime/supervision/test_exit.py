"""A process that ends before the others prints the reason once: its own error, or the first one of the run."""

import os
import platform

import pytest

from finetune.errors import CheckpointError
from finetune.runtime.supervision.exit import ProcessExit, is_broken_collective
from finetune.runtime.supervision.status import RankProcess, StatusFile, exit_from_error

CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:50")


class Left(Exception):
    """Raised instead of the exit of the process."""


def leave(code: int) -> None:
    raise Left(code)


def ranks_of(folder, world=2) -> list[tuple[StatusFile, ProcessExit]]:
    statuses = [
        StatusFile(folder, rank=rank, me=RankProcess(rank, "here", rank), launch="now", since=0.0)
        for rank in range(world)
    ]
    statuses[0].start()
    return [(status, ProcessExit(status, rank=rank, leave=leave)) for rank, status in enumerate(statuses)]


def code_after(ending: ProcessExit, error: BaseException) -> int:
    with pytest.raises(Left) as left:
        ending.exit_after_error(error)
    return left.value.args[0]


def test_the_first_error_is_shown_and_the_broken_collective_of_the_others_is_not(tmp_path, capsys):
    (_, own), (_, other) = ranks_of(tmp_path)
    assert code_after(other, CheckpointError("the disk is full\nin two lines")) == 2
    assert capsys.readouterr().err == "[rank 1] error: the disk is full\nin two lines\n"
    assert code_after(own, CLOSED) == 1
    assert capsys.readouterr().err == "", "a user's mistake is printed once"


def test_a_bug_in_this_package_keeps_its_traceback(tmp_path, capsys):
    (_, own), _ = ranks_of(tmp_path)
    assert code_after(own, ZeroDivisionError("by nothing")) == 1
    assert "Traceback" in (said := capsys.readouterr().err) or "ZeroDivisionError: by nothing" in said


def test_a_rank_that_exited_without_an_error_is_named(tmp_path, capsys):
    (_, own), _ = ranks_of(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0)
    own.peers = (
        RankProcess(0, platform.node(), os.getpid()),
        RankProcess(1, platform.node(), child),
    )  # a zombie by now, or soon
    assert code_after(own, CLOSED) == 1
    os.waitpid(child, 0)
    assert f"error: lost contact with rank 1 (process {child} on " in capsys.readouterr().err


def test_a_stopped_rank_is_not_a_failure_of_the_others(tmp_path, capsys):
    (_, own), (status, _) = ranks_of(tmp_path)
    status.claim_exit(exit_from_error(KeyboardInterrupt(), rank=1))
    assert code_after(own, CLOSED) == 130
    assert capsys.readouterr().err == "rank 0 exits because rank 1 was stopped: interrupted\n"


@pytest.mark.parametrize(
    ("error", "expected"), [(CLOSED, True), (ValueError("Connection closed by peer"), False), (RuntimeError(), False)]
)
def test_broken_collectives_are_distinguished_from_other_errors(error, expected):
    assert is_broken_collective(error) is expected


def test_an_error_caused_by_a_broken_collective_counts_as_one():
    try:
        try:
            raise CLOSED
        except RuntimeError as error:
            raise ValueError("while saving") from error
    except ValueError as error:
        assert is_broken_collective(error)
