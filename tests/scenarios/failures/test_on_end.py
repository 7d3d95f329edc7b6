"""`run.on_end` beside real runs that end in every way: the command runs once, when no process of the run is left."""

import contextlib
import os
import re
import signal
from collections.abc import Sequence

import psutil
import pytest

from tests.scenarios.running import Running

pytestmark = pytest.mark.full

QUIET = ["evaluate=null", "data.validation=null", "checkpoint.every_steps=2", "train.steps=8"]
COMMAND = (
    'echo "$FINETUNE_OUTCOME: $FINETUNE_REASON $FINETUNE_EXIT_CODE"; ls "$FINETUNE_RUN_FOLDER/final"; for each in '
    '$(sed -n "s/^ *.pid.: \\([0-9]*\\),*$/\\1/p" "$FINETUNE_STATUS_FILE"); do grep -s State: /proc/$each/status; done'
)
"""Says how the run ended, what it left, and which of its processes are still there."""


def on_end(when: Sequence[str] = ("finished", "failed", "idle"), **keys: object) -> str:
    others = "".join(f", {key}: {value}" for key, value in keys.items())
    return f"run.on_end={{command: '{COMMAND}', when: [{', '.join(when)}], restart_seconds: 0{others}}}"


def sentinel_of(run: Running) -> int:
    """Return the process that waits for the end of the run."""
    run.until(lambda: "run.on_end: when the run ends" in run.output or run.process.poll() is not None)
    found = re.search(r"Process (\d+) waits", run.output)
    assert found is not None, run.output
    return int(found[1])


def outcome_of(run: Running) -> list[str]:
    """Wait for the end of the sentinel, and return the lines that the command has said."""
    run.until_gone([sentinel_of(run)])
    path = run.folder / "on_end.log"
    lines = path.read_text().splitlines() if path.exists() else []
    assert not list(run.folder.glob(".on_end*"))
    assert sum("; runs echo" in line for line in lines) == sum(line.endswith(" s") for line in lines) <= 1
    return [line for line in lines if " UTC " not in line]


def has_trained(run: Running) -> bool:
    """Return whether the sentinel knows that the training has begun."""
    return any('"has_trained": true' in path.read_text() for path in run.folder.glob(".on_end-*.json"))


def assert_nothing_was_left(said: list[str]) -> None:
    assert [line for line in said if line.startswith("State:") and "Z" not in line] == []


def test_the_on_end_command_runs_for_every_outcome_of_one_process(begin):
    """All at once: each takes a second, and the start of each some more."""
    finished = begin(None, name="end-finished", overrides=[*QUIET, on_end()])
    nan = begin(None, name="end-nan", overrides=[*QUIET, on_end()], faults="forward step=3 do=nan")
    killed = begin(None, name="end-killed", overrides=[*QUIET, on_end()], faults="forward step=3 do=kill")
    stopped = begin(
        None, name="end-stopped", overrides=[*QUIET, on_end(["stopped"])], faults="forward step=3 do=terminate"
    )
    person = begin(None, name="end-person", overrides=[*QUIET, on_end()], faults="forward step=3 do=interrupt")
    full = begin(None, name="end-full", overrides=[*QUIET, on_end()], faults="; ".join(["save.write do=no_space"] * 3))
    typo = begin(None, name="end-typo", overrides=[*QUIET, on_end(), "data.train.path=none.jsonl"])
    said = outcome_of(finished)
    assert said[0] == "finished: finished 0"
    assert "model.safetensors" in said
    assert_nothing_was_left(said)
    assert outcome_of(nan)[0] == "failed: NonFiniteError 1"
    assert outcome_of(killed)[0] == "failed: killed 1"
    assert outcome_of(stopped)[0] == "stopped: signal SIGTERM 143"
    assert outcome_of(full)[0] == "failed: CheckpointError 2"
    assert outcome_of(person) == []  # Ctrl-C: somebody is there
    assert typo.until_ended() == 2
    assert "waits for that" not in typo.output
    assert finished.until_ended() == 0
    assert nan.until_ended() == 1


@pytest.mark.distributed
def test_rank_0_is_killed_and_the_command_waits_for_the_other_one(begin):
    run = begin("ddp", name="end-rank-0", overrides=[*QUIET, on_end()], faults="backward step=3 rank=0 do=kill")
    said = outcome_of(run)
    assert said[0].startswith("failed: ")
    assert_nothing_was_left(said)
    assert run.until_ended() != 0


@pytest.mark.distributed
def test_all_processes_are_killed_at_once(begin):
    run = begin("ddp", name="end-all", overrides=[*QUIET, on_end()], faults="data step=3 do=sleep")
    run.until(lambda: has_trained(run) and len(run.pids()) == 2)  # killed earlier, the start would have failed
    for pid in [run.process.pid, *run.pids()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said = outcome_of(run)
    assert said[0] == "failed: killed 1"
    assert_nothing_was_left(said)


@pytest.mark.distributed
def test_a_hang_is_reported_first_and_a_run_that_only_waits_is_idle(begin):
    hangs = begin(
        None,
        name="end-hang",
        overrides=[*QUIET, "run.hang_after_seconds=4", on_end(idle_after_seconds=300)],
        faults="data step=3 do=sleep",
    )
    waits = begin(
        "ddp",
        name="end-idle",
        overrides=[*QUIET, "run.hang_after_seconds=null", on_end(idle_after_seconds=10)],
        faults="data step=3 rank=1 do=sleep",
    )
    assert outcome_of(hangs)[0] == "failed: Hang 1"
    assert (hangs.folder / "hang").is_dir()
    said = outcome_of(waits)
    assert said[0] == "idle: no progress 1"
    assert all(psutil.pid_exists(pid) for pid in waits.pids())  # what becomes of them is the command's business
