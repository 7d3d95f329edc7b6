"""The limits of a container are read from the files of its cgroup."""

import errno
import os
import resource
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from finetune.errors import CheckpointError, DiskError, UserError
from finetune.runtime.files import atomic
from finetune.runtime.resources import disk_errors, quota_cores, usable_cores


@pytest.fixture
def groups(tmp_path):
    """Return a function that writes a file below a folder of control groups, and the folder."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


def test_without_a_cgroup_limit_there_is_no_quota(groups):
    assert quota_cores(groups("cpu.max", "max 100000\n")) is None


def test_a_cpu_quota_is_a_number_of_cores(groups):
    assert quota_cores(groups("cpu.max", "250000 100000\n")) == 2.5


def test_the_smallest_quota_of_the_parent_groups_counts(groups):
    groups("kubepods/pod/cpu.max", "max 100000\n")
    assert quota_cores(groups("kubepods/cpu.max", "400000 100000\n"), within="/kubepods/pod") == 4.0


def test_older_pooling_files_are_read(groups):
    groups("cpu/cpu.cfs_period_us", "100000\n")
    assert quota_cores(groups("cpu/cpu.cfs_quota_us", "300000\n")) == 3.0
    assert quota_cores(groups("cpu/cpu.cfs_quota_us", "-1\n")) is None


def test_usable_cores_are_at_least_one():
    assert usable_cores() >= 1


@contextmanager
def no_file_larger_than(num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_reports_the_reason_and_the_free_space(tmp_path):
    with (
        no_file_larger_than(100),
        pytest.raises(DiskError, match=r"may not grow further.*See `ulimit -f`.*has .* free"),
        disk_errors([tmp_path], DiskError),
    ):
        atomic.write_text(tmp_path / "file", "x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_in_a_rust_library_is_recognized(tmp_path):
    weights = {"weight": torch.zeros(1000)}
    with (
        no_file_larger_than(100),
        pytest.raises(DiskError, match="may not grow further"),
        disk_errors([tmp_path], DiskError),
    ):
        save_file(weights, tmp_path / "model.safetensors")


REFUSALS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "cannot be written or read: Read-only file system",
    errno.EACCES: "cannot be written or read: Permission denied",
}


@pytest.mark.parametrize("number", REFUSALS)
def test_each_disk_error_has_its_message(tmp_path, number):
    with pytest.raises(UserError, match=REFUSALS[number]), disk_errors([tmp_path], UserError):
        raise OSError(number, os.strerror(number), str(tmp_path / "file"))


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied", "/somewhere/else"),
        FileNotFoundError(errno.ENOENT, "No such file", "x"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        CheckpointError("cannot write"),
        KeyError("x"),
    ],
)
def test_errors_unrelated_to_these_folders_are_not_wrapped(tmp_path, error):
    with pytest.raises(type(error)) as raised, disk_errors([tmp_path], DiskError):
        raise error
    assert raised.value is error


LIMITED = """
import resource
import subprocess
import sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from finetune.runtime.resources import raise_file_limit
print(raise_file_limit({world}), resource.getrlimit(resource.RLIMIT_NOFILE), sep="|")
"""


@pytest.mark.parametrize(
    ("soft", "hard", "world", "warning", "limits"),
    [
        (1024, 4096, 8, "None", "(1024, 4096)"),
        (1024, 4096, 1000, "None", "(3512, 4096)"),
        (256, 1024, 1000, "may open 1,024 files and sockets", "(1024, 1024)"),
    ],
)
def test_the_soft_limit_of_open_files_is_raised_for_many_ranks(soft, hard, world, warning, limits):
    program = LIMITED.format(soft=soft, hard=hard, world=world)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said, _, found = done.stdout.strip().partition("|")
    assert warning in said
    assert found == limits
    if said != "None":
        assert "a run of 1,000 processes may need 3,512" in said
        assert "Raise the hard limit to 3,512 (docker: --ulimit nofile=3512" in said
