"""`run.on_end` and real runs that end in every way: the command runs once, and the exit code is that of the run."""

import re

import pytest

from tests.scenarios.running import Running

pytestmark = pytest.mark.full

COMMAND = (
    'run.on_end=echo "END $FINETUNE_OUTCOME, $FINETUNE_REASON $FINETUNE_EXIT_CODE"; ls "$FINETUNE_RUN_FOLDER"; false'
)
QUIET = ["evaluate=null", "data.validation=null", "checkpoint.every_steps=2", "train.steps=8", COMMAND]


def end_of(run: Running) -> tuple[int, list[str]]:
    """Return the exit code of the run, and what its command has printed about its end."""
    code = run.until_ended()
    return code, re.findall("^END (.+)", run.output, re.MULTILINE)


def test_the_on_end_command_runs_for_every_outcome_of_one_process(begin):
    """All at once: each takes a second, and the start of each some more."""
    finished = begin(None, name="end-finished", overrides=QUIET)
    nan = begin(None, name="end-nan", overrides=QUIET, faults="forward step=3 do=nan")
    stopped = begin(None, name="end-stopped", overrides=QUIET, faults="forward step=3 do=terminate")
    person = begin(None, name="end-person", overrides=QUIET, faults="forward step=3 do=interrupt")
    full = begin(None, name="end-full", overrides=QUIET, faults="; ".join(["save.write do=no_space"] * 3))
    hangs = begin(None, name="end-hang", overrides=[*QUIET, "run.hang_after_seconds=4"], faults="data step=3 do=sleep")
    typo = begin(None, name="end-typo", overrides=[*QUIET, "data.train.path=none.jsonl"])
    killed = begin(None, name="end-killed", overrides=QUIET, faults="forward step=3 do=kill")
    assert end_of(finished) == (0, ["finished, finished 0"])
    assert "\nfinal\n" in finished.output and "exit code 1 after" in finished.output
    assert end_of(nan) == (1, ["failed, NonFiniteError 1"])
    assert "error: " in nan.output.partition("END ")[0]  # printed before the command is run
    assert end_of(stopped) == (143, ["stopped, signal SIGTERM 143"])
    assert end_of(person) == (130, ["interrupted, signal SIGINT 130"])
    assert end_of(full) == (2, ["failed, CheckpointError 2"])
    assert end_of(hangs) == (1, ["failed, Hang 1"])
    assert end_of(typo) == (2, [])
    assert end_of(killed)[1] == []  # nobody is left to run it
    again = begin(None, name="end-finished", overrides=QUIET)
    assert end_of(again) == (0, [])


@pytest.mark.distributed
def test_the_on_end_command_runs_once_for_two_ranks_of_which_one_fails(begin):
    run = begin("ddp", name="end-rank-1", overrides=QUIET, faults="forward step=3 rank=1 do=nan")
    other = begin("ddp", name="end-killed-1", overrides=QUIET, faults="backward step=3 rank=1 do=kill")
    assert end_of(run)[1] == ["failed, NonFiniteError 1"], run.output
    assert end_of(other)[1] == ["failed, LostContact 1"], other.output


@pytest.mark.distributed
def test_our_launcher_runs_the_on_end_command_of_a_rank_0_that_was_killed(begin):
    program = ["-m", "finetune", "train", "--processes", "2"]
    killed = begin(None, name="end-0", overrides=QUIET, faults="backward step=3 rank=0 do=kill", program=program)
    finished = begin(None, name="end-both", overrides=QUIET, program=program)
    code, ends = end_of(killed)
    assert code != 0 and len(ends) == 1 and ends[0].startswith("failed, "), killed.output
    assert end_of(finished) == (0, ["finished, finished 0"])
