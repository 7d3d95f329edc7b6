"""What a container grants is read from the files of its cgroup."""

import pytest

from finetune.runtime.cores import quota_cores, usable_cores


@pytest.fixture
def groups(tmp_path):
    """Return a function that writes a file below a folder of control groups, and the folder."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return tmp_path

    return write


def test_without_a_limit_there_is_none(groups):
    assert quota_cores(groups("cpu.max", "max 100000\n")) is None


def test_a_quota_is_so_many_cores(groups):
    assert quota_cores(groups("cpu.max", "250000 100000\n")) == 2.5


def test_the_smallest_of_the_groups_around_it_counts(groups):
    groups("kubepods/pod/cpu.max", "max 100000\n")
    assert quota_cores(groups("kubepods/cpu.max", "400000 100000\n"), within="/kubepods/pod") == 4.0


def test_the_older_files_are_read_too(groups):
    groups("cpu/cpu.cfs_period_us", "100000\n")
    assert quota_cores(groups("cpu/cpu.cfs_quota_us", "300000\n")) == 3.0
    assert quota_cores(groups("cpu/cpu.cfs_quota_us", "-1\n")) is None


def test_there_is_at_least_one_core():
    assert usable_cores() >= 1
