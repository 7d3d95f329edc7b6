"""Locks of killed builds are removed, an unreachable hub is not retried, and freed memory is reused."""

import inspect
import os
import platform
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from torch.utils.file_baton import FileBaton

from finetune.runtime import upstream
from finetune.runtime.upstream import (
    ABANDONED,
    BuildLockWatcher,
    without_hub_retries,
)
from tests.launching import capture

OWNER = """
import sys
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("compiling", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """Return the path of a build's lock on a local disk."""
    monkeypatch.setattr(upstream, "_CONTAINER_MARKS", ())
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


def test_a_thread_that_waits_for_a_lock_is_logged_with_its_owner_or_how_to_end_the_wait(lock):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    waiting = threading.Thread(target=FileBaton(str(lock), wait_seconds=0.01).wait)
    messages, now = [], [0.0]
    watch = BuildLockWatcher(log=messages.append, clock=lambda: now[0])
    try:
        assert owner.stdout.readline() == b"compiling\n"
        watch.look()
        assert messages == []  # the main thread waits for nothing
        waiting.start()
        watch._main = waiting.ident
        until(lambda: upstream.awaited_lock(sys._current_frames().get(waiting.ident)) == lock)
        for now[0] in (10.0, 20.0, 45.0):
            watch.look()
        held = f"{lock} is held by process {owner.pid} ("
        assert [held in message for message in messages] == [True, True] and "for 35 s so far" in messages[1]
    finally:
        owner.kill()
        owner.wait()
    now[0] = 90.0
    watch.look()
    assert "delete it" in messages[2] and str(lock) in messages[2] and lock.exists(), "it may just have been made"
    os.utime(lock, (0, 0))
    watch.look()
    waiting.join(timeout=10)
    assert not waiting.is_alive() and not lock.exists() and messages[-1].startswith(f"removed {lock}")


@pytest.mark.parametrize("file_system", ["nfs4", "fuse.juicefs", "lustre"])
def test_a_lock_that_another_machine_may_hold_is_kept(lock, monkeypatch, file_system):
    lock.touch()
    os.utime(lock, (0, 0))
    mount = SimpleNamespace(mountpoint=str(lock.parent), fstype=file_system)
    monkeypatch.setattr(upstream.psutil, "disk_partitions", lambda **_: [mount])
    assert not upstream.remove_abandoned_lock(upstream.inspect_lock(lock), log=print) and lock.exists()


def until(is_so):
    deadline = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


def test_torch_before_2_14_waits_for_a_file_that_a_killed_build_leaves():
    from torch.utils import cpp_extension

    waits = "FileBaton(os.path.join(build_directory, 'lock'))" in inspect.getsource(cpp_extension._jit_compile)
    assert waits == upstream.torch_waits_for_locks()


def test_the_lock_file_of_a_build_is_ignored_if_torch_does_not_wait_for_it(lock, monkeypatch):
    lock.touch()
    monkeypatch.setattr(upstream, "torch_waits_for_locks", lambda: True)
    assert [(each.path, each.state) for each in upstream.build_locks(lock.parents[1])] == [(lock, ABANDONED)]
    monkeypatch.setattr(upstream, "torch_waits_for_locks", lambda: False)
    assert upstream.build_locks(lock.parents[1]) == []


def test_the_hub_is_not_contacted_for_local_models():
    before = constants.HF_HUB_OFFLINE
    with pytest.raises(OSError), without_hub_retries(is_local=True):
        assert constants.HF_HUB_OFFLINE
        raise OSError
    assert before == constants.HF_HUB_OFFLINE


def test_huggingface_hub_still_fetches_a_list_of_agents_unless_it_is_offline():
    from huggingface_hub.utils import _detect_agent

    assert "constants.HF_HUB_OFFLINE" in inspect.getsource(_detect_agent)


FAULTS = """
import resource, sys
from finetune.runtime.upstream import keep_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [b"x" * num_bytes for num_bytes in (4 << 20, 24 << 20, 100 << 20)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "kept":
    assert keep_freed_memory()
print([faults_of_a_step() for _ in range(5)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have another malloc")
def test_memory_that_a_step_frees_costs_no_page_fault_in_the_next(figure):
    faults = {}
    for name in ("kept", "as it was"):
        done = capture([sys.executable, "-c", FAULTS, name], is_cold=True)
        assert done.returncode == 0, done.stderr
        faults[name] = int(done.stdout)
    figure("page faults of a later step with 128 MiB of tensors", faults["kept"], at_most=50)
    assert faults["as it was"] > 10_000, "glibc no longer gives freed blocks back: keep_freed_memory may go"


SHAPES = """
import os, resource, sys, torch
from finetune.runtime.upstream import bound_primitive_cache

if sys.argv[1] == "bounded":
    bound_primitive_cache(os.environ)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for length in range(1, 401):
    torch.nn.functional.gelu(torch.zeros(1, length, 64))
    if length == 100:
        first = peak()
print(peak() - first)
"""


def test_new_shapes_in_every_step_do_not_increase_memory(figure):
    grown = {}
    for name in ("bounded", "as it was"):
        done = capture([sys.executable, "-c", SHAPES, name], is_cold=True)
        assert done.returncode == 0, done.stderr
        grown[name] = int(done.stdout)
    figure("kB by which 300 further shapes raise the peak", grown["bounded"], at_most=grown["as it was"] / 4)


@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"])
def test_a_primitive_cache_capacity_set_by_the_user_is_kept(name):
    variables = {name: "7"}
    upstream.bound_primitive_cache(variables)
    assert variables == {name: "7"}
