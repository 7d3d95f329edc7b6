"""What a worker of Ray Train gives to its rank, and what it reports of the run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.commands.launch.ray_worker import Attempt, end_replaced_ranks, place_rank, read_metrics
from finetune.runtime.run_folder import mark_attempt

ATTEMPT = Attempt(3, 6, "10.0.0.1", 29500, since=0.0)


@pytest.mark.parametrize(("rank", "local_rank", "local_world"), [(0, 0, 4), (3, 3, 4), (4, 0, 2), (5, 1, 2)])
def test_ranks_have_the_variables_of_torchrun(rank: int, local_rank: int, local_world: int) -> None:
    """Eight workers on two hosts, of which the last two are spares."""
    assert place_rank(ATTEMPT, rank=rank, local_rank=local_rank, local_workers=4).variables() == {
        "RANK": str(rank),
        "WORLD_SIZE": "6",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }


def test_a_stopped_rank_of_an_earlier_attempt_is_killed_and_no_other(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "finetune", "train", "--config", "job.yaml"]
    ranks = {}
    for number in (1, 2):
        environment = {**os.environ, **mark_attempt(tmp_path, number)}
        ranks[number] = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ranks[number].send_signal(signal.SIGSTOP)
    end_replaced_ranks(tmp_path, 2, patience_seconds=0.1)
    assert ranks[1].wait(timeout=30) == -signal.SIGKILL
    assert ranks[2].poll() is None
    ranks[2].kill()
    ranks[2].wait()


def test_metrics_are_those_of_the_newest_whole_event(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    (tmp_path / "status.json").write_text(json.dumps({"state": "stopped", "step": 7, "reason": "signal SIGTERM"}))
    lines = [json.dumps({"event": "StepTaken", "step": step, "loss": float(step)}) for step in (6, 7)]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"event": "StepTaken", "st']))
    assert read_metrics(tmp_path) == {"state": "stopped", "step": 7, "reason": "signal SIGTERM", "loss": 7.0}


def test_the_reason_of_a_failure_is_the_message_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "error": {"message": "the disk is full"}}))
    assert read_metrics(tmp_path) == {"state": "failed", "reason": "the disk is full"}
