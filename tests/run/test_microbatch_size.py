"""The longest batch of a run is tried, `auto` becomes a number, and a resume keeps it where nothing has changed."""

import json
from unittest.mock import patch

import pytest

from finetune.config.load import load_config
from finetune.errors import UserError
from finetune.memory.limits import MemoryLimits
from finetune.memory.trial import Trial
from finetune.run.microbatch_size import (
    MICROBATCH_FILE,
    MicrobatchRecord,
    read_microbatch_record,
)
from finetune.run.setup.precompute import samples_of_positions
from finetune.run.train import train_from_config
from tests.scenarios.trained import forget

AUTO = ("train.microbatch_size=auto", "train.steps=6", "evaluate=null", "data.validation=null")
RECORD = MicrobatchRecord(microbatch_size=4, strategy="single", processes=1, peaks={"memory": 500})


@pytest.mark.parametrize("text", [None, "", "{}", "[1]", '{"microbatch_size": "many"}'])
def test_a_missing_or_damaged_record_is_ignored(tmp_path, text):
    if text is not None:
        (tmp_path / MICROBATCH_FILE).write_text(text)
    assert read_microbatch_record(tmp_path) is None


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"strategy": "fsdp2"}, False),
        ({"limit": 500}, False),
        ({"sizes": (1, 3)}, False),
        ({"record": RECORD.model_copy(update={"processes": 2})}, False),
        ({"record": RECORD.model_copy(update={"microbatch_size": 16})}, False),
    ],
)
def test_a_resume_keeps_the_size_only_if_the_launch_and_the_free_memory_are_the_same(changed, holds):
    case = {"record": RECORD, "strategy": "single", "limit": 1000, "sizes": (1, 2, 4, 8), **changed}
    limits = MemoryLimits((100,), (case["limit"],))
    kept = case["record"].still_holds(case["strategy"], limits, memories=["memory"], sizes=case["sizes"])
    assert kept == holds


def test_a_written_size_that_does_not_fit_ends_the_run_and_names_the_rows(job, tmp_path):
    loaded = load_config(job, [f"run.folder={tmp_path}/run", "train.try_longest_batch=always"])
    with patch.object(Trial, "peaks", lambda *_, **__: None), pytest.raises(UserError) as raised:
        train_from_config(loaded)
    forget()
    message = str(raised.value)
    assert raised.value.exit_code == 2
    assert message.startswith("out of memory: the longest batch of this run does not fit, so step ")
    assert "It has 4 samples, the longest of" in message and "Rows: " in message and "train.jsonl, " in message
    assert "set train.microbatch_size: 2 (the loss stays the same), or auto" in message


def test_a_frozen_model_scores_fewer_long_samples_at_once():
    assert [samples_of_positions(longest) for longest in (0, 10, 1024, 100_000)] == [64, 64, 16, 2]


@pytest.mark.full
@pytest.mark.distributed
def test_auto_finds_a_size_keeps_it_and_searches_again_with_another_number_of_processes(launch):
    alone = launch(None, name="auto", overrides=[*AUTO, "train.stop_after_steps=3"])
    assert "auto: 8, the most that the global batch allows" in alone.output
    assert alone.output.count(" per rank = ") == 1
    assert "memory: weights, gradients and optimizer state" in alone.output and "measured peak" in alone.output
    spread = launch("ddp", name="auto", overrides=[*AUTO, "train.stop_after_steps=4"])
    assert "8 was found on 1 processes under single; it cannot be used now" in spread.output
    assert "auto: 4, the most that the global batch allows" in spread.output
    again = launch("ddp", name="auto", overrides=AUTO)
    assert "auto: 4, as at the start of this run" in again.output
    assert json.loads((again.folder / "microbatch.json").read_text())["microbatch_size"] == 4
    assert [each.code for each in (alone, spread, again)] == [0, 0, 0]
