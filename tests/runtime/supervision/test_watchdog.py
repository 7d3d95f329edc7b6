"""The watchdog ends a process that is stuck: after another rank's end, in a hang, or on a signal before training."""

import json
import os
import platform
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from finetune.runtime import distributed
from finetune.runtime.run_folder import mark_attempt
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.exit import ProcessExit
from finetune.runtime.supervision.signals import ReceivedSignals
from finetune.runtime.supervision.status import RankProcess, StatusFile, exit_from_error
from finetune.runtime.supervision.watchdog import (
    HangReport,
    Watchdog,
    format_late_ranks,
    keep_previous_reports,
    read_reports,
    write_hang_report,
)


class Left(Exception):
    """Raised instead of the exit of the process."""


def leave(code: int) -> None:
    raise Left(code)


class Watched:
    """Rank 0 of two ranks."""

    def __init__(self, folder, *, world=2) -> None:
        self.note = ReceivedSignals()
        self.others = StatusFile(folder, rank=1, me=RankProcess(1, "here", 11), launch="now", since=0.0)
        status = StatusFile(folder, rank=0, me=RankProcess(0, "here", 10), launch="now", since=0.0)
        status.start()
        self.ending = ProcessExit(status, rank=0, leave=leave)
        self.dog = Watchdog(folder, status=status, ending=self.ending, note=self.note, rank=0, world=world)

    def code(self) -> int:
        with pytest.raises(Left) as left:
            self.dog.check()
        return left.value.args[0]


@pytest.fixture
def watched(tmp_path, monkeypatch) -> Iterator[Watched]:
    monkeypatch.setattr("finetune.runtime.supervision.watchdog._QUIET_SECONDS", 0.0)
    monkeypatch.setattr("finetune.runtime.supervision.watchdog._REPORT_SECONDS", 0.0)
    each = Watched(tmp_path)
    yield each
    each.dog.stop()


def test_the_watchdog_does_nothing_in_a_healthy_run(watched):
    watched.dog.detect_hangs(1000.0)
    watched.dog.check()
    watched.dog.begin_training()
    watched.note.note(signal.SIGTERM, None)  # for the loop, from now on
    watched.dog.check()


def test_a_signal_before_training_ends_the_run_with_its_exit_code(watched, tmp_path):
    watched.note.note(signal.SIGTERM, None)
    assert watched.code() == 143
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["reason"], status["exit_code"]) == ("stopped", "signal SIGTERM", 143)


def test_a_signal_after_the_failure_of_another_rank_reports_that_failure(watched, capsys):
    watched.others.claim_exit(exit_from_error(ValueError("broken"), rank=1))
    watched.note.note(signal.SIGTERM, None)
    assert watched.code() == 1
    assert capsys.readouterr().err == "rank 0 exits because rank 1 failed: ValueError: broken\n"


def test_a_process_that_disappeared_is_reported_as_lost_contact(watched, capsys):
    watched.dog.begin_training()
    watched.ending.peers = [RankProcess(0, platform.node(), os.getpid()), RankProcess(1, platform.node(), 2**22 + 1)]
    assert watched.code() == 1
    assert "lost contact with rank 1 (process 4194305 on " in capsys.readouterr().err


def test_a_process_that_a_newer_attempt_has_replaced_ends_and_leaves_the_status_alone(
    watched, tmp_path, monkeypatch, capsys
):
    for name, value in mark_attempt(tmp_path, 3).items():
        monkeypatch.setenv(name, value)
    watched.dog.check()
    before = (tmp_path / "status.json").read_bytes()
    mark_attempt(tmp_path, 4)
    assert watched.code() == 1
    assert "attempt 4 of the run has started without this host" in capsys.readouterr().err
    assert (tmp_path / "status.json").read_bytes() == before


def test_no_progress_within_the_timeout_is_a_hang_with_stacks(watched, tmp_path, capsys):
    heartbeat.fault_point("forward", step=4)
    watched.dog.detect_hangs(1e-9)
    assert watched.code() == 1
    assert "no progress for 0 s (run.hang_after_seconds). No report from rank 1." in capsys.readouterr().err
    assert json.loads((tmp_path / "hang" / "rank-00000.json").read_text())["step"] == 4
    assert json.loads((tmp_path / "status.json").read_text())["error"]["type"] == "Hang"


def test_a_failing_watchdog_is_logged_once_and_ends_the_run_if_it_keeps_failing(tmp_path, capsys):
    watched = Watched(tmp_path)
    looks = []

    def look() -> None:
        looks.append(1)
        raise OverflowError("timestamp too large")

    class NoWait:
        def wait(self, seconds: float) -> bool:
            return False

    watched.dog.check = look
    watched.dog._is_over = NoWait()
    with pytest.raises(Left) as left:
        watched.dog.run()
    assert left.value.args == (1,)
    said = capsys.readouterr().err
    assert (
        said.count("the watchdog of rank 0 failed to check the run and tries again: OverflowError: timestamp too large")
        == 1
    )
    assert 10 < len(looks) < 100


def watchdog_of(status: StatusFile, folder: Path, *, rank: int) -> Watchdog:
    ending = ProcessExit(status, rank=rank)
    return Watchdog(folder, status=status, ending=ending, note=ReceivedSignals(), rank=rank, world=2)


def test_the_others_see_rank_0_in_the_status_file(tmp_path):
    now = [1000.0]
    files = [
        StatusFile(
            tmp_path, rank=rank, me=RankProcess(rank, "here", rank), launch="now", since=0.0, clock=lambda: now[0]
        )
        for rank in range(2)
    ]
    files[0].start()
    dog = watchdog_of(files[1], tmp_path, rank=1)
    assert dog.is_rank_0_alive()
    assert not dog.is_rank_0_alive()
    now[0] += 4.0
    files[0].refresh()
    assert dog.is_rank_0_alive()
    assert not dog.is_rank_0_alive()


def test_work_of_rank_0_alone_is_not_a_hang_while_it_refreshes_the_status(tmp_path, monkeypatch):
    monkeypatch.setattr("finetune.runtime.supervision.status._REFRESH_SECONDS", 0.0)
    ended = []
    status = StatusFile(tmp_path, rank=0, me=RankProcess(0, "here", 10), launch="now", since=0.0)
    status.start()
    ending = ProcessExit(status, rank=0, leave=ended.append)
    dog = Watchdog(tmp_path, status=status, ending=ending, note=ReceivedSignals(), rank=0, world=1)
    heartbeat.fault_point("export.write", step=4)
    dog.detect_hangs(0.1)
    try:
        with distributed.rank_0_works_alone():
            time.sleep(0.2)
            dog.check()
            assert ended == []
            monkeypatch.setattr(status, "refresh", lambda: None)  # a dead disk
            time.sleep(0.2)
            dog.check()
        assert ended == [1]
    finally:
        dog.stop()
    assert not distributed.is_rank_0_alone


COLLECTIVE = "/site-packages/torch/distributed/distributed_c10d.py:3000 all_reduce"


def report(rank: int, point: str, step: int, where: str = "/home/me/dataset.py:10 read") -> HangReport:
    return HangReport(rank, "here", 10 + rank, point, step, 60.0, where)


def test_a_report_holds_the_stacks_and_the_last_point(tmp_path):
    write_hang_report(tmp_path, rank=3, point="forward", step=7, silent_seconds=61.0)
    assert "test_a_report_holds_the_stacks" in (tmp_path / "hang" / "rank-00003.txt").read_text()
    (found,) = read_reports(tmp_path)
    assert (found.rank, found.point, found.step) == (3, "forward", 7)
    assert "watchdog.py" in found.where
    keep_previous_reports(tmp_path)
    keep_previous_reports(tmp_path)
    assert read_reports(tmp_path) == []
    assert (tmp_path / "hang-before" / "rank-00003.json").exists()


@pytest.mark.parametrize(
    ("points", "world", "named"),
    [
        ([(0, "data", 4), (2, "data", 4)], 3, "No report from rank 1."),
        (
            [(0, "forward", 4), (1, "data", 4)],
            2,
            "Behind the others: rank 1 (process 11 on here), 60 s after it passed",
        ),
        ([(0, "evaluate", 4), (1, "data", 4)], 2, "Behind the others: rank 0 ("),
        ([(0, "update.after", 3), (1, "save.begin", 4)], 2, "Behind the others: rank 0 ("),
        ([(0, "data", 4, COLLECTIVE), (1, "data", 4, COLLECTIVE)], 2, "Last seen: rank 0 ("),
        ([(0, "data", 4)], 1, "Last seen: rank 0 ("),
    ],
)
def test_ranks_without_a_report_or_at_an_earlier_point_are_named(points, world, named):
    sentence = format_late_ranks([report(*point) for point in points], world=world)
    assert sentence.startswith(named) and sentence.count("rank ") == 1
