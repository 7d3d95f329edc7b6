"""When one process of a run fails, dies or hangs, all end soon, and the first error is the one that is shown."""

import os
import signal

import pytest

QUIET = ["evaluate=null", "data.validation=null", "checkpoint.every_steps=2", "train.steps=20"]
QUIET += ["checkpoint.asynchronous=false"]  # these steps take milliseconds: what is written behind would be cut off


@pytest.mark.distributed
def test_a_rank_that_raises_ends_all_and_its_error_is_the_one_that_is_shown(launch):
    run = launch("ddp", name="raises", overrides=QUIET, faults="forward step=3 rank=1 do=raise")
    status = run.status()
    assert run.code == 1
    assert status["state"] == "failed"
    assert (status["error"]["rank"], status["error"]["type"], status["exit_code"]) == (1, "RuntimeError", 1)
    assert (status["step"], status["checkpoint"]) == (3, str(run.folder / "checkpoints" / "step-000002"))
    assert "[rank 1] Traceback" in run.output
    assert run.output.count("RuntimeError: injected fault at forward") == 2  # its traceback, and:
    assert "rank 0 exits because rank 1 failed: RuntimeError: injected fault at forward" in run.output
    assert "gloo" not in run.output


@pytest.mark.distributed
def test_a_rank_that_is_killed_is_named_and_the_next_launch_continues(launch):
    run = launch("ddp", name="killed", overrides=QUIET, faults="backward step=3 rank=1 do=kill")
    status = run.status()
    gone = status["ranks"][1]["pid"]
    assert run.code == 1
    assert (status["state"], status["error"]["rank"], status["error"]["type"]) == ("failed", 0, "LostContact")
    assert f"error: lost contact with rank 1 (process {gone} on " in run.output
    assert "[rank 0]: Traceback" not in run.output
    again = launch("ddp", name="killed", overrides=QUIET)
    assert again.code == 0, again.output
    assert "resumes from" in again.output
    assert (again.status()["state"], again.status()["step"], again.status()["error"]) == ("finished", 20, None)


@pytest.mark.full
@pytest.mark.distributed
def test_a_rank_that_hangs_is_named_with_everybodys_stacks(launch):
    faults = "data step=3 rank=1 do=sleep"
    run = launch("fsdp2", name="hangs", overrides=[*QUIET, "run.hang_after_seconds=5"], faults=faults)
    error = run.status()["error"]
    assert run.code == 1
    assert error["type"] == "Hang"
    assert "Behind the others: rank 1 " in error["message"]
    assert "passed `data` at step 3" in error["message"]
    stacks = [(run.folder / "hang" / f"rank-{rank:05d}.txt").read_text() for rank in range(2)]
    assert "torch/distributed/" in stacks[0]  # waits
    assert "heartbeat.py" in stacks[1]  # is waited for
    assert run.output.count(" exits because rank ") == 1


@pytest.mark.full
@pytest.mark.distributed
def test_a_second_launch_is_rejected_while_the_first_is_running(begin, launch):
    first = begin("ddp", name="claimed", overrides=QUIET, faults="data step=2 do=sleep")
    first.until(lambda: first.status().get("state") == "running")
    second = launch("ddp", name="claimed", overrides=QUIET)
    assert second.code != 0
    assert f"is being written by process {first.pids()[0]} on " in second.output
    assert first.status()["state"] == "running"  # and not what the second has to say
    for pid in first.pids():
        os.kill(pid, signal.SIGKILL)
    first.until_ended()
    third = launch("ddp", name="claimed", overrides=QUIET)
    assert third.code == 0, third.output
