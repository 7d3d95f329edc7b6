"""Damaged prepared data is never trained on: before the start it is prepared again, later the run stops."""

from pathlib import Path

import pytest

from finetune.data.token_cache import chunks
from finetune.errors import CheckpointError, TrainingError
from finetune.report.history import read_events
from finetune.train import loop
from tests.scenarios.trained import train_here
from tests.small_job import write_job

SHORT = [
    "train.global_batch_size=4",
    "train.microbatch_size=2",
    "train.steps=6",
    "evaluate.every_steps=3",
    "checkpoint.every_steps=2",
]


@pytest.fixture
def job(tmp_path) -> Path:
    return write_job(tmp_path)


@pytest.fixture
def run(job, capsys):
    """Train with overrides; return the losses and digests of all steps and what was said."""

    def start(name, *overrides):
        folder = job.parent / "runs" / name
        train_here(job, f"run.folder={folder}", *SHORT, *overrides)
        steps = [each for each in read_events(folder / "events.jsonl") if each["event"] == "StepTaken"]
        return {each["step"]: (each["loss"], each["samples_sha256"]) for each in steps}, capsys.readouterr().out

    return start


def flip(job, name="chunk-000000.bin", *, num_sets=2):
    folders = sorted(path for path in (job.parent / "cache" / "prepared").glob("[!.]*"))
    assert len(folders) == num_sets
    for folder in folders:
        content = bytearray((folder / name).read_bytes())
        for offset in range(128, 2000, 40):
            content[offset] ^= 1
        with (folder / name).open("r+b") as file:
            file.write(content)


def asides(job):
    return len(list((job.parent / "cache" / "prepared").glob(".damaged-*")))


def test_damage_before_a_start_is_made_again_and_the_losses_are_those_of_the_undamaged_run(run, job):
    wanted, _ = run("whole")
    flip(job)
    got, said = run("damaged")
    assert got == wanted
    assert said.count("is renamed to .damaged-") == 2, "training and validation rows"
    events = (job.parent / "runs" / "damaged" / "events.jsonl").read_text()
    assert "is renamed to .damaged-" in events

    flip(job)
    run("stopped", "train.stop_after_steps=2")
    flip(job)
    got, said = run("stopped")
    assert "resumes from" in said
    assert got == wanted
    assert asides(job) == 6


def test_damage_during_training_stops_the_run_before_the_step_and_the_same_command_resumes(run, job, monkeypatch):
    wanted, _ = run("whole")
    advance = loop.advance

    def and_damage(progress, record):
        advance(progress, record)
        if progress.step == 3:
            flip(job)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "advance", and_damage)
        with pytest.raises(TrainingError, match=r"(?s)is not taken because its data is damaged.*train\.jsonl, row \d+"):
            run("stopped", "evaluate={}")
    assert asides(job) == 1
    got, said = run("stopped", "evaluate={}")
    assert got == wanted
    assert "resumes from" in said


def test_validation_rows_that_are_damaged_are_not_measured(run, job, monkeypatch):
    advance = loop.advance

    def and_damage(progress, record):
        advance(progress, record)
        if progress.step == 3:
            flip(job)

    monkeypatch.setattr(loop, "advance", and_damage)
    with pytest.raises(Exception, match=r"held_out\.jsonl, row \d.*differs from the prepared sample"):
        run("measured")


def test_a_run_does_not_resume_if_its_rows_become_other_tokens(run, job, monkeypatch):
    """Files, tokenizer and options are the same and a library is another one: only the contents tell."""
    run("first", "train.stop_after_steps=2")
    assembled = chunks._assemble_chunk

    def otherwise(plan, trainable, counts):
        for _, sample in trainable:
            sample.arrays["input_ids"][0] ^= 1
        return assembled(plan, trainable, counts)

    monkeypatch.setattr(chunks, "_assemble_chunk", otherwise)
    with pytest.raises(CheckpointError, match="would resume on other data"):
        run("first", f"data.cache_folder={job.parent}/other")
