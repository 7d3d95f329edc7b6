"""What a user registers for the end of a process runs at every end of a run: profilers, coverage, trackers."""

import os

import pytest

SITE = """
import atexit, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

def note(what):
    (Path(os.environ["HANDLERS"]) / f"{what}-{os.environ['RANK']}").write_text("")

if "RANK" in os.environ:
    atexit.register(note, "atexit")
    threading._register_atexit(note, "threading")
"""
QUIET = ["evaluate=null", "data.validation=null", "checkpoint.every_steps=2", "train.steps=4"]


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "overrides", "faults", "expected_code"),
    [
        ("success", [], "", 0),
        ("hang", ["run.hang_after_seconds=4"], "data step=3 rank=1 do=sleep", 1),
    ],
)
def test_handlers_that_a_user_has_registered_run_on_every_rank(
    launch, tmp_path, monkeypatch, name, overrides, faults, expected_code
):
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("HANDLERS", str(tmp_path))
    run = launch("ddp", name=f"handlers-{name}", overrides=[*QUIET, *overrides], faults=faults, is_cold=True)
    assert run.code == expected_code, run.output
    ran = {each.name for each in tmp_path.iterdir()} - {"sitecustomize.py", "__pycache__"}
    assert {"atexit-0", "atexit-1"} <= ran
    if name != "hang":  # the thread that ends a process beside its stuck main thread joins no others
        assert {"threading-0", "threading-1"} <= ran
