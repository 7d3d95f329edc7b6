"""Locks of killed builds are reported and removed, an unreachable hub is not retried, and freed memory is reused."""

import inspect
import platform
import subprocess
import sys
import threading
import time

import pytest
from huggingface_hub import constants
from torch.utils.file_baton import FileBaton

from finetune.runtime import upstream
from finetune.runtime.upstream import (
    ABANDONED,
    BUILDING,
    UNKNOWN,
    BuildLockWatcher,
    clear_build_locks,
    inspect_lock,
    remove_abandoned,
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
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(upstream, "_CONTAINER_MARKS", ())
    monkeypatch.setattr(upstream, "torch_waits_for_locks", lambda: True)
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@pytest.fixture(scope="module")
def owner_of():
    """Start a process that holds the lock like torch, and return it."""
    started = []

    def start(path):
        program = [sys.executable, "-c", OWNER, str(path)]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "compiling\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_lock_is_held_while_its_owner_lives_and_removed_once_it_was_killed(lock, owner_of):
    owner, messages = owner_of(lock), []
    assert inspect_lock(lock).state == BUILDING and f"process {owner.pid} (" in inspect_lock(lock).owner
    clear_build_locks(log=messages.append)
    assert lock.exists() and messages == [f"note: {inspect_lock(lock)}"]
    assert not remove_abandoned(lock, pause=lambda seconds: None)
    owner.kill()
    owner.wait()
    assert inspect_lock(lock).state == ABANDONED
    clear_build_locks(log=messages.append)
    assert not lock.exists()
    assert messages[1] == f"removed {lock} was left by a build that was killed: every later run would wait for it."


def test_a_compiler_that_outlives_its_parent_still_compiles(lock):
    lock.touch()
    compiler = subprocess.Popen(["/bin/sleep", "60"], cwd=lock.parent)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(upstream, "_COMPILERS", ("sleep",))
            assert inspect_lock(lock).state == BUILDING
    finally:
        compiler.kill()
        compiler.wait()
    assert inspect_lock(lock).state == ABANDONED


@pytest.mark.parametrize("kind", ["nfs4", "fuse.juicefs", "lustre"])
def test_a_lock_on_a_shared_file_system_is_reported_and_kept(lock, monkeypatch, kind):
    lock.touch()
    monkeypatch.setattr(upstream, "_mount", lambda path: (lock.parents[1], kind))
    messages = []
    clear_build_locks(log=messages.append)
    assert inspect_lock(lock).state == UNKNOWN and lock.exists()
    assert (
        messages[0].startswith(f"warning: the owner of {lock} is unknown: it is on a {kind} file system")
        and "delete it" in messages[0]
    )


def test_in_a_container_a_volume_may_be_shared(lock, monkeypatch):
    lock.touch()
    monkeypatch.setattr(upstream, "_CONTAINER_MARKS", (lock,))
    monkeypatch.setattr(upstream, "_mount", lambda path: (lock.parents[1], "ext4"))
    assert "which other containers may share" in inspect_lock(lock).owner


def test_a_build_lock_acquired_again_between_two_checks_is_kept(lock):
    lock.touch()

    def taken_anew(seconds):
        lock.rename(lock.with_name("old"))
        lock.touch()

    assert not remove_abandoned(lock, pause=taken_anew)
    assert lock.exists()


def test_a_thread_waiting_for_a_dead_build_is_released_and_waiting_for_a_running_build_is_logged(lock, owner_of):
    owner, messages, now = owner_of(lock), [], [0.0]
    waiting = threading.Thread(target=FileBaton(str(lock), wait_seconds=0.01).wait)
    watch = BuildLockWatcher(log=messages.append, clock=lambda: now[0])
    watch.look()
    assert messages == []  # the main thread waits for nothing
    waiting.start()
    watch._main = waiting.ident
    until(lambda: upstream.awaited_lock(sys._current_frames().get(waiting.ident)) == lock)
    for now[0] in (10.0, 20.0, 45.0):
        watch.look()
    assert messages == [
        f"waiting for an extension to be compiled, for {seconds} s so far: {inspect_lock(lock)}" for seconds in (0, 35)
    ]
    owner.kill()
    owner.wait()
    watch.look()
    waiting.join(timeout=10)
    assert not waiting.is_alive() and not lock.exists()
    assert messages[-1].startswith(f"removed {lock}")


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
    assert [each.path for each in upstream.build_locks(lock.parents[1])] == [lock]
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
