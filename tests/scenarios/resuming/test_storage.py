"""A run on a real S3 server that goes from machine to machine: each has lost what the one before had staged."""

import shutil
from dataclasses import replace

import pytest

from finetune.runtime.files.remote import RemoteFolder
from tests.run.state.staging import NotedRemote

pytestmark = [pytest.mark.distributed, pytest.mark.full]


@pytest.fixture(scope="module")
def straight(launch):
    run = launch(None, name="straight-to-a-folder")
    assert run.code == 0, run.output
    return run


def test_a_run_in_remote_storage_resumes_after_its_machine_was_lost(launch, straight, bucket, tmp_path):
    url = f"{bucket}/runs/wandering"
    remote = NotedRemote(url)

    def machine(name, *overrides, faults=""):
        stage = tmp_path / name
        places = [f"run.folder={url}", f"run.local_folder={stage}", *overrides]
        return replace(launch(None, name=f"wandering-{name}", overrides=places, faults=faults), folder=stage)

    first = machine("first", "train.stop_after_steps=4", faults="upload.file do=raise")
    assert first.code == 0, first.output
    assert f"everything is at {url}" in first.output
    assert "RuntimeError: injected fault at upload.file" in first.output
    assert list(remote.checkpoints()) == ["step-000004"]

    shutil.rmtree(first.folder)
    second = machine("second", faults="upload.marker step=8 do=kill")
    assert second.code == -9, second.output
    assert "fetched step-000004, " in second.output
    assert "step-000008" in remote.checkpoints()
    assert "manifest.json" not in remote.checkpoints()["step-000008"]

    shutil.rmtree(second.folder)
    third = machine("third")
    assert third.code == 0, third.output
    assert "fetched step-000004" in third.output and "after step 4" in third.output
    wanted = {event["step"]: event["loss"] for event in straight.events("StepTaken")}
    taken = third.events("StepTaken")
    assert {event["step"] for event in taken} == wanted.keys()  # the log came along
    assert all(event["loss"] == wanted[event["step"]] for event in taken)  # steps uploaded before the kill stand twice

    there = remote.checkpoints()
    assert list(there) == ["step-000004", "step-000008"] == third.checkpoints()
    assert all("manifest.json" in files for files in there.values())
    names = RemoteFolder(url).sizes()
    assert {"config.yaml", "resolved.yaml", "environment.json", "events.jsonl", "status.json"} <= names.keys()
    assert {"final/model.safetensors", "inputs/tokenizer.json"} <= names.keys()
    assert remote.read("final/model.safetensors") == (straight.folder / "final/model.safetensors").read_bytes()
    assert b'"state": "finished"' in remote.read("status.json")
