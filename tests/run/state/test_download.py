import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from finetune.checkpoint.format.manifest import manifest_digest, read_manifest
from finetune.config.explain import resolved_yaml
from finetune.config.load import LoadedConfig, load_config, with_local_folder
from finetune.errors import CheckpointError
from finetune.run.state.run_folder import download_run
from finetune.runtime.files.remote import RemoteFolder
from tests.refusals import refused
from tests.run.state.staging import checkpoint


@dataclass
class Machine:
    """A machine on which the job is started, and the storage that it shares with others."""

    loaded: LoadedConfig
    said: list[str] = field(default_factory=list)

    @property
    def stage(self):
        return Path(self.loaded.config.run.folder)

    @property
    def remote(self):
        return RemoteFolder(self.loaded.remote)

    def upload(self, *, leave_out=()):
        for path in self.stage.rglob("*"):
            name = path.relative_to(self.stage).as_posix()
            if path.is_file() and name not in leave_out:
                self.remote.upload(path, name)

    def fetch(self):
        download_run(self.loaded, log=self.said.append)
        return sorted(path.name for path in (self.stage / "checkpoints").glob("*"))


@pytest.fixture
def machine(job, tmp_path, request):
    """Return a function that starts the job on a machine of this name."""

    def start(name, *, url=f"memory://fetch/{request.node.name}"):
        overrides = [f"run.folder={url}", f"run.local_folder={tmp_path / name}"]
        return Machine(with_local_folder(load_config(job, overrides)))

    return start


def test_a_run_at_a_url_is_staged_and_its_resolved_config_keeps_the_url(machine, tmp_path):
    first = machine("first")
    assert first.stage == tmp_path / "first"
    text = resolved_yaml(first.loaded)
    assert f'folder: "{first.remote.url}"' in text
    assert f'local_folder: "{tmp_path}/first"' in text


def test_a_run_in_a_local_folder_is_not_downloaded(job):
    loaded = load_config(job, ["run.folder=runs/first"])
    assert with_local_folder(loaded) is loaded
    download_run(loaded, log=print)
    assert not Path(loaded.config.run.folder).exists()


def test_a_fresh_machine_gets_the_newest_checkpoint_and_the_run_s_small_files(machine):
    first, second = machine("first"), machine("second")
    for step in (4, 8):
        checkpoint(first.stage, step)
    (first.stage / "events.jsonl").write_text("{}\n")
    (first.stage / "status.json").write_text("of the first machine")
    first.upload()
    assert second.fetch() == ["step-000008"]
    assert read_manifest(second.stage / "checkpoints/step-000008") == read_manifest(
        first.stage / "checkpoints/step-000008"
    )
    assert (second.stage / "events.jsonl").read_text() == "{}\n"
    assert not (second.stage / "status.json").exists()
    assert second.said == [f"fetched step-000008, 12 B, from {first.remote.url}"]


def test_a_remote_folder_without_a_manifest_is_not_a_checkpoint(machine):
    first, second = machine("first"), machine("second")
    for step in (4, 8):
        checkpoint(first.stage, step)
    first.upload(leave_out=["checkpoints/step-000008/manifest.json"])
    assert second.fetch() == ["step-000004"]


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_remote_checkpoint_that_fails_verification_is_skipped_for_the_previous_one(machine, damage):
    first, second = machine("first"), machine("second")
    for step in (4, 8):
        checkpoint(first.stage, step)
    first.upload()
    if damage == "flipped":
        (first.stage / "checkpoints/step-000008/model/0").write_text("weights 9 ")
        first.upload()
    else:
        first.remote.delete(["checkpoints/step-000008/model/0"])
    assert second.fetch() == ["step-000004"]
    assert second.said[0].startswith(f"warning: passed over {first.remote.url}/checkpoints/step-000008: ")


def test_a_machine_that_is_as_far_or_further_fetches_nothing(machine):
    first = machine("first")
    checkpoint(first.stage, 4)
    (first.stage / "events.jsonl").write_text("older")
    first.upload()
    (first.stage / "events.jsonl").write_text("newer")
    checkpoint(first.stage, 8)
    assert first.fetch() == ["step-000004", "step-000008"]
    assert first.said == []
    assert (first.stage / "events.jsonl").read_text() == "newer"


def test_downloading_from_an_empty_storage_leaves_it_empty(machine):
    first = machine("first")
    assert first.fetch() == []
    assert first.remote.sizes() == {}


def test_storage_that_takes_nothing_is_an_error_now_and_not_at_the_first_checkpoint(machine, bucket):
    nowhere = machine("first", url=f"{bucket}-that-is-not-there/runs/first")
    with refused(CheckpointError, "that-is-not-there", varies=True):
        nowhere.fetch()


def test_a_checkpoint_of_a_newer_format_is_refused_and_no_older_one_fetched(machine):
    first = machine("first")
    for step in (2, 4):
        checkpoint(first.stage, step)
    marker = first.stage / "checkpoints" / "step-000004" / "manifest.json"
    value = json.loads(marker.read_text()) | {"format_version": 3, "versions": {"finetune": "9.1.0"}}
    marker.write_text(json.dumps(value | {"sha256": manifest_digest(value)}))
    first.upload()
    second = machine("second")
    with refused(CheckpointError, "format 3", "9.1.0"):
        second.fetch()
    assert list((second.stage / "checkpoints").glob("*")) == []


def test_unknown_names_in_the_storage_are_not_downloaded(machine, tmp_path):
    first = machine("first")
    checkpoint(first.stage, 2)
    first.upload()
    for name in ("checkpoints/step-99999999999999999999/manifest.json", "checkpoints/step-²/manifest.json", "STOP"):
        (tmp_path / "file").write_text("x")
        first.remote.upload(tmp_path / "file", name)
    first.remote.upload(tmp_path / "file", ".writer.lock")
    second = machine("second")
    assert second.fetch() == ["step-000002"]
    assert sorted(path.name for path in second.stage.iterdir()) == [".fetch.lock", "checkpoints"]
