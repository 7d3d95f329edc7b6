"""In a hang every rank writes a report, and the rank that the others wait for is named."""

import threading
import time

import pytest

from finetune.runtime.supervision.hang import (
    HangReport,
    format_blocking_ranks,
    keep_previous_reports,
    read_reports,
    write_report,
)

COLLECTIVE = "/site-packages/torch/distributed/distributed_c10d.py:3000 all_reduce"


def report(rank: int, point: str, step: int, where: str = COLLECTIVE, called: str = "") -> HangReport:
    return HangReport(rank, "here", 10 + rank, point, step, 60.0, where, called)


def test_a_report_holds_the_stacks_and_the_last_point(tmp_path):
    write_report(tmp_path, rank=3, point="forward", step=7, silent_seconds=61.0)
    assert "test_a_report_holds_the_stacks" in (tmp_path / "hang" / "rank-00003.txt").read_text()
    (found,) = read_reports(tmp_path)
    assert (found.rank, found.point, found.step) == (3, "forward", 7)
    assert "hang.py" in found.where
    keep_previous_reports(tmp_path)
    keep_previous_reports(tmp_path)
    assert read_reports(tmp_path) == []
    assert (tmp_path / "hang-before" / "rank-00003.json").exists()


def test_a_rank_without_a_report_is_named_first():
    named = format_blocking_ranks([report(0, "data", 4), report(2, "data", 4)], world=3)
    assert named == "No report from rank 1."


def test_the_rank_with_the_least_progress_is_named():
    assert "wait for rank 1 (" in format_blocking_ranks([report(0, "forward", 4), report(1, "data", 4)], world=2)
    assert "wait for rank 0 (" in format_blocking_ranks([report(0, "evaluate", 4), report(1, "data", 4)], world=2)
    assert "wait for rank 0 (" in format_blocking_ranks(
        [report(0, "update.after", 3), report(1, "save.begin", 4)], world=2
    )


def test_among_ranks_at_the_same_point_the_one_that_is_in_no_collective_is_named():
    at_work = report(1, "data", 4, where="/home/me/dataset.py:10 read")
    assert "wait for rank 1 (process 11 on here), 60 s after it passed `data` at step 4, in /home/me/dataset.py" in (
        format_blocking_ranks([report(0, "data", 4), at_work], world=2)
    )


def test_no_blocking_rank_is_named_if_it_cannot_be_determined():
    where = "/finetune/train/meters.py:10 numbers"
    same = [report(rank, "data", 4, where=where) for rank in range(2)]
    assert format_blocking_ranks(same, world=2) == "It cannot be determined which rank the others wait for."
    assert format_blocking_ranks(same[:1], world=1).startswith("Last seen: rank 0 (")


@pytest.mark.parametrize(
    ("where", "called"),
    [
        ("/finetune/train/meters.py:120 read", "tolist"),
        ("/finetune/train/meters.py:140 is_finite", "item"),
        ("/finetune/checkpoint/sharding/gather.py:88 run", "copy_"),
        ("/home/me/task.py:10 score", "cpu"),
        ("/site-packages/torch/cuda/__init__.py:1100 synchronize", "_cuda_synchronize"),
        ("/site-packages/torch/cuda/streams.py:90 synchronize", ""),
    ],
)
def test_a_rank_that_waits_for_its_device_is_not_named_as_blocking(where, called):
    victim = report(0, "update.after", 3, where=where, called=called)
    at_work = report(1, "data", 4, where="/home/me/dataset.py:10 read")
    named = format_blocking_ranks([victim, at_work], world=2)
    assert "wait for rank 1 (" in named, "though rank 0 is at an earlier point"
    assert "rank 0 (" not in named


def test_no_blocking_rank_is_named_if_all_wait_for_their_devices():
    waits = [report(rank, "forward", rank, where="/finetune/a.py:1 f", called="tolist") for rank in range(2)]
    assert format_blocking_ranks(waits, world=2) == "It cannot be determined which rank the others wait for."


def test_a_rank_that_waits_for_a_collective_that_was_started_before_is_not_named():
    waits = report(0, "data", 4, where="/finetune/runtime/distributed.py:200 wait", called="wait")
    at_work = report(1, "data", 4, where="/home/me/dataset.py:10 read", called="sleep")
    named = format_blocking_ranks([waits, at_work], world=2)
    assert "wait for rank 1 (" in named
    assert named.endswith("in /home/me/dataset.py:10 read, calling sleep.")


class Sums:
    """Stands for a tensor on a busy device, whose `tolist` has no Python frame while it waits."""

    tolist = staticmethod(time.sleep)

    def sum(self) -> "Sums":
        return self


def test_a_hang_report_names_the_called_function_without_a_python_frame(tmp_path):
    sums = Sums()
    place = {"rank": 0, "point": "update.after", "step": 3, "silent_seconds": 61.0}
    writer = threading.Timer(0.2, write_report, (tmp_path,), place)
    writer.start()
    sums.sum().tolist(1.0)  # `sum()` has returned
    writer.join()
    (found,) = read_reports(tmp_path)
    assert found.called == "tolist"
    assert found.waits_for_device
    assert "test_a_hang_report_names_the_called_function" in found.where
