"""No process group gives up before the hang report: those over which tensors are sent wait longer than its limit."""

import json
from pathlib import Path

import pytest

from finetune.runtime.distributed import group_timeout
from tests import launching
from tests.devices import ON_GPU, needs

PROGRAM = Path(__file__).with_name("groups_program.py")
PROCESSES = {"hsdp": 4}


def timeouts(job: Path, strategy: str, *, processes: int, overrides: tuple[str, ...] = ()) -> list[dict]:
    """Return the timeouts of all groups of a run under the strategy, read from their options."""
    name = "-".join([strategy, *overrides]).replace("=", "-")
    file, log = job.parent / f"groups-{name}.json", job.parent / "logs" / f"groups-{name}.log"
    overrides = ("train.microbatch_size=2", *overrides)
    words = [str(PROGRAM), str(job), str(file), f"run.folder={job.parent / 'runs' / f'groups-{name}'}", *overrides]
    command = launching.accelerate_command(strategy, *words, processes=processes)
    assert launching.run(command, log=log, timeout_seconds=540) == 0, log.read_text(errors="replace")
    return json.loads(file.read_text())


def cases():
    """Yield device and strategy: on a GPU one rank, as NCCL takes one on each, so no copies of shards there."""
    for strategy in ("ddp", "fsdp2", "hsdp", "zero2", "zero3"):
        marks = [] if strategy in ("ddp", "fsdp2") else [pytest.mark.full]
        yield pytest.param("cpu", strategy, marks=[*marks, *needs(strategy)])
        if strategy != "hsdp":
            yield pytest.param("cuda", strategy, marks=[*ON_GPU, *needs(strategy)])


@pytest.mark.distributed
@pytest.mark.parametrize(("device", "strategy"), list(cases()))
def test_every_group_of_a_run_outwaits_the_hang_report(job, device, strategy, figure):
    processes = 1 if device == "cuda" else PROCESSES.get(strategy, 2)
    found = timeouts(job, strategy, processes=processes)
    of_libraries = [each for each in found if not each["is_own"]]
    assert len(found) - len(of_libraries) == 2, "those for objects and for work in the background are ours"
    if device == "cuda":
        assert any("nccl" in each["backend"] for each in of_libraries)
    if strategy in ("hsdp", "zero2", "zero3"):
        assert len(of_libraries) > 1, "a mesh or DeepSpeed has made groups of its own"
    least = min(each["seconds"] for each in of_libraries)
    figure(f"{strategy}: timeout of the first group to give up, s after the hang limit", least - 1800.0, at_least=60.0)
    background, host = sorted(each["seconds"] for each in found if each["is_own"])
    assert background == 3600.0
    assert host >= max(each["seconds"] for each in of_libraries), "every step's counts are waited for there"


@pytest.mark.distributed
def test_process_groups_wait_for_days_without_hang_detection(job):
    found = timeouts(job, "ddp", processes=2, overrides=("run.hang_after_seconds=null",))
    shortest = min(each["seconds"] for each in found if not each["is_own"])
    assert shortest == pytest.approx(24 * 24 * 3600.0, abs=1)  # torch 2.14 takes off an eighth of a second


@pytest.mark.parametrize("limit", [1e-3, 1.0, 540.0, 1800.0, 86_400.0, 20 * 86_400.0])
def test_for_every_limit_the_report_comes_first(limit):
    milliseconds = group_timeout(limit).total_seconds() * 1000
    assert limit * 1000 + 60_000 <= milliseconds < 2**31, "torch's store polls for so many milliseconds, as an int"
