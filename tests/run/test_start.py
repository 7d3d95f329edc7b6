"""A start that is over or refused is answered from the run's folder alone, in the words of the start itself."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata

import pytest

from finetune.checkpoint.format import layout
from finetune.config.load import load_config
from finetune.errors import CheckpointError
from finetune.run.start import preflight
from finetune.run.state.finished import FINAL_RECORD, input_stamps
from finetune.run.train import train_from_config
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

QUICK = ("train.steps=4", "checkpoint.every_steps=2", "evaluate.every_steps=2", "train.microbatch_size=2")


@pytest.fixture
def finished(trained, job, tmp_path):
    """Return a function that loads the job of a finished run, a copy for this test alone, with overrides."""
    folder = tmp_path / "run"
    shutil.copytree(trained("full"), folder)
    record = json.loads((folder / FINAL_RECORD).read_text())
    config = load_config(job).config
    record["inputs"] = input_stamps(config, before=time.time() + 1)  # the rows are younger than the test's process
    assert record["inputs"], "the rows have stamps"
    (folder / FINAL_RECORD).write_text(json.dumps(record))
    return lambda *overrides: load_config(job, [f"run.folder={folder}", *QUICK, *overrides])


def status(loaded):
    return json.loads((loaded.path.parent / loaded.config.run.folder / "status.json").read_text())


def test_preflight_reports_a_finished_run(finished, capsys):
    loaded = finished()
    assert preflight(loaded) == 0
    folder = loaded.config.run.folder
    assert capsys.readouterr().out == f"nothing to do: finished at step 4, and the model is in {folder}/final\n"
    assert (status(loaded)["state"], status(loaded)["step"], status(loaded)["exit_code"]) == ("finished", 4, 0)


def test_a_package_that_runs_from_its_source_knows_its_version(finished, monkeypatch, capsys):
    def version_of(name):
        if name == "finetune":
            raise metadata.PackageNotFoundError(name)
        return metadata.version(name)

    monkeypatch.setattr("finetune.run.start.version", version_of)
    assert preflight(finished()) == 0
    assert "nothing to do" in capsys.readouterr().out


def test_preflight_logs_changed_settings_like_the_start(finished, capsys):
    assert preflight(finished("report.log_every_steps=7")) == 0
    assert "changed since the checkpoint: report.log_every_steps 1 -> 7" in capsys.readouterr().out


@pytest.mark.parametrize("change", ["train.learning_rate=0.5", "run.seed=8", "checkpoint.resume=never"])
def test_a_refusal_is_the_very_one_of_the_start(finished, change):
    loaded = finished(change)
    with pytest.raises(CheckpointError) as early:
        preflight(loaded)
    assert status(loaded)["error"]["message"] == str(early.value)
    with pytest.raises(CheckpointError) as late:
        train_from_config(loaded)
    assert str(early.value) == str(late.value)
    assert status(loaded)["error"]["message"] == str(early.value)


def test_a_change_that_is_allowed_is_for_the_start(finished):
    assert preflight(finished("train.learning_rate=0.5", "checkpoint.allow_changes=[train.learning_rate]")) == 0


@pytest.mark.parametrize("change", ["data.max_length=63", "data.train.take=3", "train.steps=6", "train.epochs=1"])
def test_preflight_leaves_changes_that_need_data_or_more_steps_to_the_start(finished, change):
    extra = ("train.steps=null",) if "epochs" in change else ()
    try:
        assert preflight(finished(*extra, change)) is None
    except CheckpointError as error:
        assert change.partition("=")[0] in ("train.steps", "train.epochs"), error  # the budget is maths


@pytest.mark.parametrize("change", ["report.log_every_steps=7", "train.learning_rate=0.5"])
def test_rows_that_were_touched_are_for_the_start_to_look_at(finished, job, change):
    loaded = finished(change)  # a refusal names all that has changed at once, the rows among it
    rows = job.parent / "train.jsonl"
    times = (rows.stat().st_atime_ns, rows.stat().st_mtime_ns)
    os.utime(rows, ns=(times[0], times[1] + 1))
    try:
        assert preflight(loaded) is None
    finally:
        os.utime(rows, ns=times)


@pytest.mark.parametrize("damage", ["manifest", "short file", "no final", "no record", "other version", "no folder"])
def test_preflight_leaves_damaged_checkpoints_unchanged(finished, damage):
    loaded = finished("train.steps=4")
    folder = loaded.path.parent / loaded.config.run.folder
    newest = layout.newest_checkpoint(folder / CHECKPOINTS_FOLDER)
    manifest = newest / layout.MANIFEST
    match damage:
        case "manifest":
            manifest.write_text("{")
        case "short file":
            next((newest / "model").iterdir()).write_bytes(b"")
        case "no final":
            shutil.rmtree(folder / "final")
        case "no record":
            (folder / FINAL_RECORD).unlink()
        case "other version":
            content = json.loads(manifest.read_text())
            manifest.write_text(json.dumps(content | {"versions": content["versions"] | {"torch": "1.0"}}))
        case "no folder":
            shutil.rmtree(folder)
    there = sorted(path.name for path in folder.rglob("*")) if folder.exists() else []
    assert preflight(loaded) is None
    assert (sorted(path.name for path in folder.rglob("*")) if folder.exists() else []) == there


def test_only_the_first_rank_prints_the_preflight(finished, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    loaded = finished()
    assert preflight(loaded) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(CheckpointError):
        preflight(finished("train.learning_rate=0.5"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # on two machines they might see other files, and disagree
    assert preflight(loaded) is None


def test_preflight_does_not_import_torch():
    program = "import sys; import finetune.run.start; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
