import shutil

import pytest

from finetune.config.sections.checkpoint import CheckpointSection
from finetune.run.state.upload import FolderSync
from tests.run.state.staging import NotedRemote, checkpoint

WHOLE = ["manifest.json", "model/0", "progress.json"]


@pytest.fixture
def remote(request):
    place = NotedRemote(f"memory://uploads/{request.node.name}")
    yield place
    place.delete(place.sizes())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def uploads(folder, remote):
    folder.mkdir()
    return FolderSync(folder, remote, section=CheckpointSection())


def bring_up(uploads, *, is_last=False):
    return uploads.sync(is_last=is_last)


def test_a_checkpoints_marker_goes_up_last(uploads, folder, remote):
    checkpoint(folder, 4)
    assert bring_up(uploads) == []
    place = "+checkpoints/step-000004"
    assert remote.done == [f"{place}/model/0", f"{place}/progress.json", f"{place}/manifest.json"]
    remote.done.clear()
    assert bring_up(uploads) == []
    assert remote.done == []


def test_a_checkpoint_without_a_manifest_is_not_uploaded(uploads, folder, remote):
    (checkpoint(folder, 4) / "manifest.json").unlink()
    assert bring_up(uploads) == []
    assert remote.checkpoints() == {}


def test_a_removed_checkpoint_is_deleted_remotely_manifest_first_after_the_newest_is_uploaded(uploads, folder, remote):
    old = checkpoint(folder, 4)
    bring_up(uploads)
    shutil.rmtree(old)
    checkpoint(folder, 8)
    remote.failing["step-000008/manifest"] = 100
    (failure,) = bring_up(uploads)
    assert "checkpoints/step-000008: ConnectionError: the line went dead" in failure
    assert remote.checkpoints()["step-000004"] == WHOLE  # the only one that is whole there
    remote.failing.clear()
    remote.done.clear()
    assert bring_up(uploads) == []
    assert remote.done.index("+checkpoints/step-000008/manifest.json") < 3
    place = "-checkpoints/step-000004"
    assert remote.done[3:] == [f"{place}/manifest.json", f"{place}/model/0", f"{place}/progress.json"]
    assert remote.checkpoints() == {"step-000008": WHOLE}


def test_a_failed_upload_does_not_block_other_files_and_is_retried(uploads, folder, remote):
    checkpoint(folder, 4)
    (folder / "events.jsonl").write_text("{}\n")
    remote.failing["step-000004/progress"] = 1
    (failure,) = bring_up(uploads)
    assert failure.startswith("checkpoints/step-000004: ")
    assert "manifest.json" not in remote.checkpoints()["step-000004"]
    assert remote.read("events.jsonl") == b"{}\n"
    assert bring_up(uploads) == []
    assert remote.checkpoints() == {"step-000004": WHOLE}


def test_a_step_saved_again_is_replaced_remotely_without_a_manifest_meanwhile(uploads, folder, remote):
    checkpoint(folder, 4, content="first")
    bring_up(uploads)
    shutil.rmtree(folder / "checkpoints")
    checkpoint(folder, 4, content="second")
    remote.done.clear()
    assert bring_up(uploads) == []
    assert remote.done[0] == "-checkpoints/step-000004/manifest.json"
    assert remote.done[-1] == "+checkpoints/step-000004/manifest.json"
    assert remote.read("checkpoints/step-000004/model/0") == b"weights 4 second"


def test_a_checkpoint_removed_during_its_upload_is_uploaded_completely(uploads, folder, remote):
    path = checkpoint(folder, 4)
    remote.before_upload = lambda name: shutil.rmtree(path, ignore_errors=True)
    assert bring_up(uploads) == []
    assert remote.checkpoints() == {"step-000004": WHOLE}
    assert not (folder / ".uploading").exists()


def test_the_newest_goes_first(uploads, folder, remote):
    for step in (4, 8):
        checkpoint(folder, step)
    bring_up(uploads)
    assert remote.done[0].startswith("+checkpoints/step-000008/")


def test_unfinished_and_abandoned_remote_checkpoints_are_deleted_after_the_next_upload(uploads, folder, remote):
    other = folder.with_name("other")
    for step in (6, 12):
        remote.upload(checkpoint(other, step) / "model" / "0", f"checkpoints/step-{step:06d}/model/0")
    remote.upload(other / "checkpoints/step-000012/manifest.json", "checkpoints/step-000012/manifest.json")
    checkpoint(folder, 8)
    assert bring_up(uploads) == []
    assert remote.checkpoints() == {"step-000008": WHOLE}


def test_older_ones_of_another_machine_are_judged_by_the_same_retention(folder, remote):
    there = folder.with_name("there")
    for step, loss in ((2, 0.5), (4, 0.1), (6, 0.3)):
        checkpoint(there, step, metrics={"loss": loss})
    FolderSync(there, remote, section=CheckpointSection()).sync(is_last=False)
    folder.mkdir()
    uploads = FolderSync(folder, remote, section=CheckpointSection(keep_best={}))
    checkpoint(folder, 8)
    assert bring_up(uploads) == []
    assert list(remote.checkpoints()) == ["step-000004", "step-000006", "step-000008"]  # the best and the last two


def test_small_files_of_the_run_are_uploaded_when_changed(uploads, folder, remote):
    (folder / "status.json").write_text("running")
    (folder / ".writer.lock").write_text("hidden")
    (folder / "STOP").write_text("for this start alone")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    assert bring_up(uploads) == []
    assert remote.done == ["+status.json", "+tokenizer/tokenizer.json"]
    (folder / "status.json").write_text("finished")
    assert bring_up(uploads) == []
    assert remote.done[2:] == ["+status.json"]


def test_the_exported_model_goes_up_at_the_end_and_replaces_an_older_one(uploads, folder, remote, tmp_path):
    (folder / "final").mkdir()
    (folder / "final" / "model.safetensors").write_text("weights")
    remote.upload(folder / "final" / "model.safetensors", "final/model-00001-of-00002.safetensors")
    assert bring_up(uploads) == []
    assert list(remote.sizes()) == ["final/model-00001-of-00002.safetensors"]
    assert bring_up(uploads, is_last=True) == []
    assert list(remote.sizes()) == ["final/model.safetensors"]


def test_storage_that_does_not_answer_is_one_failure(uploads, remote, monkeypatch):
    monkeypatch.setattr(remote, "sizes", lambda: 1 / 0)
    assert bring_up(uploads) == [f"{remote.url} cannot be listed: division by zero"]
