"""What a GPU run stands on: the device computes, its group is there, forks can use it; pieces of a run add up."""

import json
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests import launching
from tests.devices import EVERY_DEVICE, ON_GPU
from tests.gpu import machine

TESTS = """\
import time
import pytest

def test_quick(figure):
    figure("size, kB", 2.0, at_most=3.0)

def test_missed(figure):
    figure("share", 0.5, at_least=0.9)

def test_slow():
    time.sleep(3.1)

def test_last():
    pass
"""


@EVERY_DEVICE
def test_a_group_of_one_process_sends(device):
    backend = {"cpu": "gloo", "cuda": "nccl"}[device]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        numbers = torch.arange(4.0, device=device)
        dist.all_reduce(numbers)
        gathered = torch.empty(4, device=device)
        dist.all_gather_into_tensor(gathered, numbers)
        assert gathered.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert dist.get_backend() == backend
    finally:
        dist.destroy_process_group()


@EVERY_DEVICE
def test_a_program_that_is_started_computes_on_the_device(device, figure):
    program = f"import torch; print(torch.ones(3, device={device!r}).sum().item())"
    launching.capture([sys.executable, "-c", "pass"])  # whoever forks has been started by now
    started = time.monotonic()
    ended = launching.capture([sys.executable, "-c", program])
    assert (ended.returncode, ended.stdout) == (0, "3.0\n"), ended.stderr
    figure("start of a program that uses the device, s", time.monotonic() - started)


@pytest.mark.gpu
@ON_GPU[1]
def test_the_gpu_is_free(figure):
    free, total = torch.cuda.mem_get_info()
    figure("free memory of the device, share", free / total, at_least=0.9)
    assert machine()["nccl"]


def test_an_ordinary_run_sees_no_gpu():
    assert not torch.cuda.is_available()


@pytest.fixture
def pieces(tmp_path):
    """Return a function that runs the small tests with these words and returns the output and the file of figures."""
    (tmp_path / "test_small.py").write_text(TESTS)

    def run(*words):
        plugins = ["-p", "tests.gpu", "-p", "tests.figures", "-p", "no:cacheprovider", "-c", "/dev/null"]
        command = [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(tmp_path), str(tmp_path), *words]
        ended = launching.capture([*command, "--figures", str(tmp_path / "F.json")], folder=tmp_path)
        return ended.stdout + ended.stderr, json.loads((tmp_path / "F.json").read_text())

    return run


@pytest.mark.full
def test_a_run_in_pieces_adds_up(pieces):
    output, found = pieces("--within", "3")
    assert "share: 0.5 (at least 0.9)  MISSED" in output
    assert "call it again with --figures FILE --rest" in output
    names = ("quick", "missed", "slow")
    assert [found["tests"][f"test_small.py::test_{name}"]["outcome"] for name in names] == [
        "passed",
        "failed",
        "passed",
    ]
    assert found["tests"]["test_small.py::test_quick"]["figures"] == [
        {"what": "size, kB", "value": 2.0, "at_most": 3.0, "at_least": None, "is_kept": True}
    ]
    assert (
        found["machine"]["torch"] == torch.__version__.split("+")[0] or found["machine"]["torch"] == torch.__version__
    )
    output, found = pieces("--rest")
    assert "1 failed, 1 passed, 2 deselected" in output
    assert len(found["tests"]) == 4
