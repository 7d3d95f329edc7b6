"""Two processes under DDP over gloo, on CPUs or sharing one GPU: what they learn, outlive and leave behind."""

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.devices import SELDOM_ON_CPU
from tests.scenarios.running import has_process
from tests.scenarios.strategies.tiny_timeout_program import LOADING
from tests.scenarios.strategies.tiny_timeout_program import VARIABLE as TIMEOUT

PROGRAM = (str(Path(__file__).with_name("tiny_timeout_program.py")),)
QUIET = ["evaluate=null", "data.validation=null", "train.tf32=false"]
LONG = [*QUIET, "train.steps=2000", "checkpoint.every_steps=1000", "data.num_workers=1"]

pytestmark = pytest.mark.distributed


@SELDOM_ON_CPU
def test_two_processes_have_the_losses_of_one_and_wait_for_an_export_beyond_the_group_timeout(launch, device, figure):
    """The default group gives up after `timeout`, and rank 0 writes for longer while rank 1 waits."""
    timeout, seconds = (20.0, 60.0) if device == "cuda" else (8.0, 14.0)
    alone = launch(None, name=f"one-{device}", overrides=QUIET)
    assert alone.code == 0, alone.output
    faults = f"export.write rank=0 do=sleep seconds={seconds}"
    variables = {TIMEOUT: str(timeout)}
    two = launch("ddp", name=f"two-{device}", overrides=QUIET, faults=faults, environment=variables, program=PROGRAM)
    assert two.code == 0, two.output
    assert (two.status()["state"], two.status()["exit_code"]) == ("finished", 0)
    assert (two.folder / "final" / "model.safetensors").is_file()
    farthest = max(abs(a - b) / a for a, b in zip(alone.losses(), two.losses(), strict=True))
    most = 1e-3 if device == "cuda" else 1e-4  # matrices of other shapes, perhaps in TF32
    figure("losses of two processes against one, relative", farthest, at_most=most)
    ended = {event["event"]: event["time"] for event in (*two.events("CheckpointSaved"), *two.events("RunEnded"))}
    waited = ended["RunEnded"] - ended["CheckpointSaved"]
    figure("export for which rank 1 waited, s beyond the default group's timeout", waited - timeout, at_least=1.0)


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes share a GPU under DDP only")
def test_ranks_outwait_a_rank_0_that_loads_past_the_groups_timeout(launch):
    settings, variables = [*QUIET, "train.steps=4"], {TIMEOUT: "8", LOADING: "14"}
    run = launch("fsdp2", name="loading", overrides=settings, environment=variables, program=PROGRAM)
    assert run.code == 0, run.output


@SELDOM_ON_CPU
def test_a_killed_rank_is_named_soon(begin, device, figure):
    faults = "backward step=5 rank=1 do=kill"
    run = begin("ddp", name=f"killed-{device}", overrides=LONG, faults=faults, program=PROGRAM)
    run.until(lambda: len(run.pids()) == 2)
    gone = run.pids()[1]
    run.until(lambda: not has_process(gone))
    killed_at = time.monotonic()
    run.until(lambda: f"lost contact with rank 1 (process {gone} on " in run.output)
    figure("seconds until a killed rank is named", time.monotonic() - killed_at, at_most=10.0)
    assert run.until_ended() == 1
    assert (run.status()["state"], run.status()["error"]["type"]) == ("failed", "LostContact")


@SELDOM_ON_CPU
def test_sigterm_leaves_no_process_and_no_memory(begin, device, figure):
    before = gpu_bytes() if device == "cuda" else 0
    run = begin("ddp", name=f"sigterm-{device}", overrides=LONG, program=PROGRAM)
    run.until(lambda: run.steps() > 2)
    ranks = run.pids()
    family = [child.pid for pid in (*ranks, run.process.pid) for child in children(pid)] + ranks
    assert len(ranks) == 2
    assert len(set(family)) > 2, "each rank has a loader process"
    for pid in ranks:
        os.kill(pid, signal.SIGTERM)
    run.until_ended()
    run.until_gone(family)
    assert (run.status()["state"], run.status()["reason"]) == ("stopped", "signal SIGTERM")
    left = [each.name for each in Path("/dev/shm").iterdir() if any(str(pid) in each.name for pid in family)]
    assert left == []
    if device == "cuda":
        deadline = time.monotonic() + 10.0  # the driver takes a moment
        while (held := max(0, gpu_bytes() - before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        figure("GPU memory left by a run that was stopped by SIGTERM, MiB", held / 2**20, at_most=0.0)


def children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def gpu_bytes() -> int:
    """Return the used memory of the GPU, whoever uses it."""
    free, total = torch.cuda.mem_get_info()
    return int(total - free)
