"""A plain job starts without what it does not use, and says what its start took. One process for both."""

import json
import subprocess
import sys

import pytest

from finetune.report.history import read_events

PROGRAM = """
import json, sys
import finetune.run.setup.components as startup
from finetune.__main__ import main

def told(event=startup.StartedUp, path=sys.argv.pop(), **facts):  # right behind the first step
    json.dump(sorted(sys.modules), open(path, "w"))
    return event(**facts)

startup.StartedUp = told
main()
"""

PHASES = ["imports", "data", "model", "longest batch", "evaluation", "run folder", "first step"]

NOT_FOR_A_PLAIN_JOB = {
    *("peft", "deepspeed", "datasets", "trl", "bitsandbytes", "torchao", "schedulefree", "torchvision"),
    *("torchmetrics", "sklearn", "pandas", "matplotlib", "tensorboard", "wandb", "mlflow", "trackio"),
    *("s3fs", "gcsfs", "adlfs", "pyarrow", "torch._inductor.compile_fx", "finetune.model.adapters.build"),
    *("transformers.trainer", "transformers.trainer_utils", "transformers.optimization"),
}


@pytest.fixture(scope="module")
def folder(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    overrides = ["--set", "train.steps=3", "--set", "evaluate.at_start=true", "--set", f"run.folder={folder}/run"]
    command = [sys.executable, "-c", PROGRAM, "--config", str(job), *overrides, str(folder / "modules.json")]
    subprocess.run(command, cwd=folder, check=True, timeout=300)
    return folder


def test_a_plain_job_imports_nothing_that_it_does_not_use(folder):
    modules = set(json.loads((folder / "modules.json").read_text()))
    assert {"torch", "transformers", "finetune.train.loop"} <= modules
    unused = modules & NOT_FOR_A_PLAIN_JOB
    assert not unused or unused <= _imported_by_transformers()


def _imported_by_transformers():
    """Return what transformers imports by itself: 5.17 scikit-learn and torchvision, where they are installed."""
    program = "import sys, transformers.generation.utils, transformers.image_utils; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_startup_times_are_logged_by_phase_after_the_first_step(folder):
    (told,) = [each for each in read_events(folder / "run" / "events.jsonl") if each["event"] == "StartedUp"]
    assert told["step"] == 1
    for measured in ("seconds", "cpu_seconds", "memory_bytes"):
        assert list(told[measured]) == PHASES
        assert all(value >= 0 for value in told[measured].values())
    assert told["memory_bytes"]["first step"] > told["memory_bytes"]["imports"] > 0


def test_the_run_leaves_a_report_of_all_its_steps(folder):
    page = (folder / "run" / "report.html").read_text()
    assert '<span class="state finished">' in page
    assert "<small>steps</small><b>3</b>" in page
    assert "Not found or damaged" not in page
