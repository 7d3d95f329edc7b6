"""What a run says of its size, and what it does where the longest batch does not fit."""

import json
from unittest.mock import patch

import pytest

from finetune.config.load import load_config
from finetune.errors import UserError
from finetune.run.setup.microbatch.trial import Trial
from finetune.run.setup.precompute import samples_of_positions
from finetune.run.train import train_from_config
from tests.run.trained import forget

AUTO = ("train.microbatch_size=auto", "train.steps=6", "evaluate=null", "data.validation=null")


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


def test_the_samples_that_a_frozen_model_scores_at_once_follow_their_length():
    assert [samples_of_positions(longest) for longest in (0, 10, 1024, 100_000)] == [64, 64, 16, 2]


@pytest.mark.full
@pytest.mark.distributed
def test_a_size_is_found_estimated_and_kept_and_found_anew_under_another_world_size(launch):
    alone = launch(None, name="auto", overrides=[*AUTO, "train.stop_after_steps=3"])
    assert "auto: 8, the most that the global batch allows" in alone.output
    assert alone.output.count(" per rank = ") == 1
    assert "memory: estimated" in alone.output and "measured peak" in alone.output
    spread = launch("ddp", name="auto", overrides=[*AUTO, "train.stop_after_steps=4"])
    assert "8 was found on 1 processes under single and cannot be used on 2" in spread.output
    assert "auto: 4, the most that the global batch allows" in spread.output
    again = launch("ddp", name="auto", overrides=AUTO)
    assert "auto: 4, as at the start of this run" in again.output
    assert json.loads((again.folder / "microbatch.json").read_text())["microbatch_size"] == 4
    assert [each.code for each in (alone, spread, again)] == [0, 0, 0]
