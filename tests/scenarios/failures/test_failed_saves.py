"""A run whose checkpoints cannot be written, through the whole application."""

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.full]

FULL = "; ".join(["save.write step=2 rank=1 do=no_space"] * 3)
EVERY_SECOND = "checkpoint.every_steps=2"


def test_a_run_ends_where_its_checkpoints_cannot_be_written(launch):
    ended = launch("fsdp2", name="full-disk", overrides=[EVERY_SECOND], faults=FULL)
    assert ended.code != 0
    status = ended.status()
    assert (status["state"], status["exit_code"], status["checkpoint"]) == ("failed", 2, None)
    assert "step 2 could not be written, 3 times" in status["error"]["message"]
    assert "(on rank 1)" in status["error"]["message"]
    tries = [event["message"] for event in ended.events("Warned") if "step 2 could not be written" in event["message"]]
    assert len(tries) == 2, ended.events("Warned")
    assert not list((ended.folder / "checkpoints").iterdir())


def test_a_run_continues_after_a_failed_save_with_a_warning_and_writes_the_next_checkpoint(launch):
    ended = launch(
        "fsdp2", name="full-disk-once", overrides=[EVERY_SECOND, "checkpoint.on_failure=continue"], faults=FULL
    )
    assert ended.code == 0, ended.output
    assert [event["step"] for event in ended.events("CheckpointSaved")] == [4, 6, 8]
    assert "Training continues" in ended.events("Warned")[-1]["message"]
    assert ended.checkpoints() == ["step-000006", "step-000008"]
    assert ended.status()["checkpoint"].endswith("step-000008")
