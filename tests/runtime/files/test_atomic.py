"""Files of killed writers are removed at the next start; those of running ones and of users are kept."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from finetune.errors import disk_text
from finetune.runtime.files import atomic
from finetune.runtime.files.atomic import (
    REPLACED_SUFFIX,
    SUFFIX,
    build_once,
    remove_stale,
    require_writable,
    temporary_path,
    write_json,
)

KILLED_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
from finetune.runtime.files import atomic
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
atomic.write_json(Path(sys.argv[1]) / "status.json", {"state": "running"})
"""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def of_another(name, **parts):
    """Return the temporary name of another host or process."""
    pattern = r"(?P<before>.*\.)(?P<host>[0-9a-f]{8})-(?P<pid>\d+)(?P<after>-.*)"
    found = re.fullmatch(pattern, name).groupdict() | parts
    return "{before}{host}-{pid}{after}".format(**found)


def test_temporary_files_of_a_killed_process_are_removed_at_the_next_start(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_WRITES, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert killed.returncode == -9 and left.name.startswith(".status.json.") and left.name.endswith(SUFFIX)
    assert remove_stale(tmp_path, seconds=3600) == [left]
    assert names(tmp_path) == []


def test_temporary_files_of_a_running_process_are_kept(tmp_path):
    temporary_path(tmp_path / "status.json").write_text("half")
    assert remove_stale(tmp_path, seconds=0) == []


def test_a_temporary_file_is_not_kept_for_a_later_process_with_the_same_pid(tmp_path):
    left = temporary_path(tmp_path / "status.json")
    left.write_text("half")
    os.utime(left, (1e9, 1e9))
    assert remove_stale(tmp_path, seconds=3600) == [left]


def test_only_old_temporary_files_of_another_host_are_removed(tmp_path):
    left = tmp_path / of_another(temporary_path(tmp_path / "status.json").name, host="00000000")
    left.write_text("half")
    assert remove_stale(tmp_path, seconds=3600) == []
    os.utime(left, (time.time() - 4000,) * 2)
    assert remove_stale(tmp_path, seconds=3600) == [left]


@pytest.mark.parametrize(
    "name", [".status.json.abcdefgh", ".status.json.finetune-tmp", "x.finetune-tmp", ".x.00000000-1.finetune-tmp"]
)
def test_a_users_own_file_is_never_removed(tmp_path, name):
    (tmp_path / name).write_text("mine")
    os.utime(tmp_path / name, (1e9, 1e9))
    assert remove_stale(tmp_path, seconds=0) == []


def test_folders_below_are_looked_into_and_links_are_not_followed(tmp_path):
    inside, outside = tmp_path / "run" / "samples", tmp_path / "elsewhere"
    for folder in (inside, outside):
        folder.mkdir(parents=True)
        left = temporary_path(folder / "rank-00000.jsonl")
        left.write_text("half")
        os.utime(left, (1e9, 1e9))
    (tmp_path / "run" / "link").symlink_to(outside)
    assert len(remove_stale(tmp_path / "run", seconds=3600, below=True)) == 1
    assert names(inside) == [] and len(names(outside)) == 1


def test_a_folder_killed_between_the_two_renames_gets_its_older_content_back(tmp_path):
    staging = temporary_path(tmp_path / "final")
    older = staging.with_name(staging.name + REPLACED_SUFFIX)
    for folder in (staging, older):
        folder.mkdir()
        (folder / "file").write_text(folder.name[-5:])
        os.utime(folder, (1e9, 1e9))
    remove_stale(tmp_path, seconds=3600)
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final" / "file").read_text() == "older"


def test_a_file_with_a_long_name_is_written(tmp_path):
    path = tmp_path / ("ä" * 120 + ".json")
    atomic.write_json(path, [1])
    assert names(tmp_path) == [path.name]


def make(folder, build, **named):
    messages = []
    return build_once(folder, build, log=messages.append, **named), messages


def test_an_existing_folder_is_not_built_again(tmp_path):
    build = lambda staging: (staging / "file").write_text("made")  # noqa: E731
    assert make(tmp_path / "folder", build) == (True, [])
    assert make(tmp_path / "folder", None) == (False, [])
    assert (tmp_path / "folder" / "file").read_text() == "made"


def fail(staging):
    (staging / "half").write_text("half")
    raise OSError("no room")


def test_a_failed_build_leaves_no_staging_folder(tmp_path):
    with pytest.raises(OSError, match="no room"):
        make(tmp_path / "folder", fail)
    assert [path.name for path in tmp_path.iterdir()] == [".folder.lock"]


def test_a_resumed_build_finds_its_staged_files(tmp_path):
    with pytest.raises(OSError, match="no room"):
        make(tmp_path / "folder", fail, resumes=True)
    assert not (tmp_path / "folder").exists()
    make(tmp_path / "folder", lambda staging: (staging / "rest").write_text("rest"), resumes=True)
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["half", "rest"]


def test_a_restarted_build_finds_no_files_of_a_killed_one(tmp_path):
    killed = tmp_path / ".folder.making"
    killed.mkdir()
    (killed / "half").write_text("half")
    make(tmp_path / "folder", lambda staging: (staging / "rest").write_text("rest"))
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["rest"]


def test_json_is_redacted_when_written_unless_exact_values_are_requested(tmp_path):
    value = {"url": "https://h/?token=c0ffee", "path": "\udcff\x9b"}
    write_json(tmp_path / "record.json", value)
    write_json(tmp_path / "exact.json", value, exact=True)
    read = [json.loads((tmp_path / f"{name}.json").read_text()) for name in ("record", "exact")]
    assert read == [value | {"url": "https://h/?token=[redacted]"}, value]


@pytest.mark.parametrize("name", ["folder", "file/report.json"])
def test_a_path_that_cannot_be_written_is_refused_by_its_name(tmp_path, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as refused:
        require_writable(tmp_path / name)
    assert refused.value.filename == str(tmp_path / name) and disk_text(refused.value) is not None


def test_a_path_that_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "old.json").write_text("old")
    for name in ("old.json", "new.json", "folder/new.json"):
        require_writable(tmp_path / name)
    assert names(tmp_path) == ["folder", "old.json"] and names(tmp_path / "folder") == []
    assert (tmp_path / "old.json").read_text() == "old"
