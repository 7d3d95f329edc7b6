"""A run folder has one writer, names that must be free, and processes of a replaced attempt stop writing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune.checkpoint.format import layout
from finetune.errors import LostContact, UserError
from finetune.runtime import run_folder
from finetune.runtime.run_folder import (
    FILES,
    FOLDERS,
    is_locked,
    lock_run_folder,
    mark_attempt,
    newer_attempt,
    own_attempt,
    require_free_names,
    require_newest_attempt,
)

MAKE = {
    "is a folder, not a file": lambda path: path.mkdir(),
    "is a named pipe, not a file": os.mkfifo,
    "is a broken link": lambda path: path.symlink_to("nowhere"),
    "cannot be read": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", MAKE)
def test_a_run_file_path_that_is_not_a_file_is_rejected_by_name(tmp_path, name, what):
    MAKE[what](tmp_path / name)
    with pytest.raises(UserError, match=rf"run\.folder: {tmp_path / name} {what}.*Move or delete it"):
        require_free_names(tmp_path)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_the_run_that_is_a_file_is_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=f"{tmp_path / name} is a file, not a folder"):
        require_free_names(tmp_path)


def test_files_of_a_run_and_symlinks_to_them_are_accepted(tmp_path):
    for name in FILES:
        (tmp_path / f"{name}-elsewhere").write_text("")
        (tmp_path / name).symlink_to(tmp_path / f"{name}-elsewhere")
    for name in FOLDERS:
        (tmp_path / name).mkdir()
    require_free_names(tmp_path)


def test_a_run_folder_below_a_file_is_rejected_with_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"cannot be created: {tmp_path / 'file'} is not a folder"):
        lock_run_folder(tmp_path / "file" / "run", log=print).__enter__()


def test_an_unwritable_run_folder_is_rejected(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(run_folder.os, "open", refuse)
    with pytest.raises(UserError, match="cannot be written: Read-only file system"):
        lock_run_folder(tmp_path, log=print).__enter__()


HOLDER = """
import os, sys
from pathlib import Path
from finetune.runtime.run_folder import lock_run_folder
with lock_run_folder(Path(sys.argv[1]), log=print):
    child = os.fork()  # as a data loader's process: it outlives its parent and must not keep the folder
    if child == 0:
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    print("holds", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_refused_with_who_holds_the_folder_until_that_one_dies(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        assert is_locked(tmp_path / "run")
        with (
            pytest.raises(UserError, match=rf"is being written by process {holder.pid} on .*, since 20"),
            lock_run_folder(tmp_path / "run", log=print),
        ):
            pass
        holder.kill()
        holder.wait()
        assert not is_locked(tmp_path / "run")
        with lock_run_folder(tmp_path / "run", log=print):
            assert str(os.getpid()) in (tmp_path / "run" / ".writer.lock").read_text()


def test_only_a_newer_attempt_replaces_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_newest_attempt()
    mine = mark_attempt(tmp_path, 9)
    assert own_attempt(mine) == 9 and newer_attempt(mine) is None
    mark_attempt(tmp_path, 8)  # by a host that was suspended
    mark_attempt(tmp_path, 9)  # by the other hosts of the attempt
    assert newer_attempt(mine) is None
    mark_attempt(tmp_path, 11)
    assert newer_attempt(mine) == 11
    for name, value in mine.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LostContact, match="attempt 11 of the run has started without this host"):
        require_newest_attempt()


def test_attempts_stage_checkpoints_in_separate_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = layout.staging_folder(tmp_path, 10)
    for name, value in mark_attempt(tmp_path, 2).items():
        monkeypatch.setenv(name, value)
    second = layout.staging_folder(tmp_path, 10)
    assert second != alone
    for folder in (alone, second):
        folder.mkdir()
    layout.remove_staging(tmp_path)
    assert not alone.exists() and not second.exists()


def test_a_process_does_not_write_twice_to_one_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with lock_run_folder(tmp_path / "run", log=print):
        with pytest.raises(UserError, match="this process has a run or session open"):
            lock_run_folder(tmp_path / "link", log=print).__enter__()
        with lock_run_folder(tmp_path / "other", log=print):
            assert is_locked(tmp_path / "other") is not None
    with lock_run_folder(tmp_path / "run", log=print):
        pass
