"""A process that ends, or is killed, while it writes a checkpoint behind leaves the one before."""

import signal
import sys

import pytest

from tests.checkpoint.small_run import Run
from tests.launching import capture

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def end_with(folder, *arguments, fault):
    command = [sys.executable, "-m", "tests.checkpoint.exiting_program", str(folder), *arguments]
    return capture(command, environment={"FINETUNE_FAULTS": fault}, timeout_seconds=90)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_process_ends_at_once_although_its_disk_has_stopped_answering(folder):
    ended = end_with(folder, fault="save.write step=3 do=sleep seconds=3600")
    assert (ended.returncode, ended.stdout) == (0, "training goes on\n"), ended.stderr
    assert names(folder) == [".staging-step-000003", "step-000001", "step-000002"]
    assert Run(folder).resume()["step"] == 2
    Run(folder).train(range(2, 3))
    assert names(folder) == ["step-000002", "step-000003"]


@pytest.mark.parametrize("point", ["save.write", "save.rename"])
def test_a_process_killed_during_a_save_leaves_the_previous_checkpoint_intact(folder, point):
    ended = end_with(folder, "--waits", fault=f"{point} step=3 do=kill")
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert names(folder) == [".staging-step-000003", "step-000001", "step-000002"]
    run = Run(folder)
    assert (run.resume()["step"], run.said) == (2, [])
