"""A start of a run that is over does nothing, and one with other settings is refused; torch is imported late."""

import json
import shutil
import subprocess
import sys

import pytest

from finetune.config.load import load_config
from finetune.errors import CheckpointError
from finetune.run.train import train_from_config

QUICK = ("train.steps=4", "checkpoint.every_steps=2", "evaluate.every_steps=2", "train.microbatch_size=2")


@pytest.fixture
def finished(trained, job, tmp_path):
    """Return a function that loads the job of a finished run, a copy for this test alone, with overrides."""
    folder = tmp_path / "run"
    shutil.copytree(trained("full"), folder)
    return lambda *overrides: load_config(job, [f"run.folder={folder}", *QUICK, *overrides])


def status(loaded):
    return json.loads((loaded.path.parent / loaded.config.run.folder / "status.json").read_text())


def test_a_finished_run_logs_changed_settings_and_does_nothing(finished, capsys):
    loaded = finished("report.log_every_steps=7")
    assert train_from_config(loaded) == 0
    output = capsys.readouterr().out
    assert "changed since the checkpoint: report.log_every_steps 1 -> 7" in output
    assert f"nothing to do: finished at step 4, and the model is in {loaded.config.run.folder}/final\n" in output
    assert (status(loaded)["state"], status(loaded)["step"], status(loaded)["exit_code"]) == ("finished", 4, 0)


@pytest.mark.parametrize("change", ["train.learning_rate=0.5", "run.seed=8", "checkpoint.resume=never"])
def test_a_finished_run_refuses_other_maths(finished, change):
    loaded = finished(change)
    with pytest.raises(CheckpointError) as refusal:
        train_from_config(loaded)
    assert status(loaded)["error"]["message"] == str(refusal.value)


def test_the_start_does_not_import_torch():
    program = "import sys; import finetune.run.start; print([n for n in ('torch', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
