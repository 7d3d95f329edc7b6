"""What a supervisor reads in the run folder."""

import json
from pathlib import Path

from finetune.launch.supervisor.members import Attempt
from finetune.launch.supervisor.run_status import RunStatus, read_run_status

ATTEMPT = Attempt(3, ("a", "b"), ("10.0.0.1", "10.0.0.2"), 29500, "starts")


def write_status(folder: Path, *, code: int, launch: str) -> None:
    error = {"rank": 0, "type": "UserError", "message": "there is no such key"}
    (folder / "status.json").write_text(json.dumps({"exit_code": code, "error": error, "launch": launch}))


def test_only_a_mistake_of_this_attempt_counts(tmp_path: Path) -> None:
    for name in ("step-000020", "step-000100", "step-7 (copy)", ".bad-step-000200"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100)
    write_status(tmp_path, code=2, launch="10.0.0.1:29500:0")
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100, "there is no such key")
    assert read_run_status(tmp_path, None) == RunStatus(100)
    write_status(tmp_path, code=2, launch="10.0.0.9:29500:0")
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100)
    write_status(tmp_path, code=1, launch="10.0.0.1:29500:0")
    assert read_run_status(tmp_path, ATTEMPT) == RunStatus(100)


def test_a_damaged_status_file_is_ignored_by_the_supervisor(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"exit_code": 2, "error": 3, "launch": null}'):
        (tmp_path / "status.json").write_text(text)
        assert read_run_status(tmp_path, ATTEMPT) == RunStatus(0)
