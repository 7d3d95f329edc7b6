"""How the tests meet a GPU: `pytest -m gpu` has it for itself, every other run does not see it.

pytest -m gpu                                             all of it, one test at a time
pytest -m gpu --figures F.json --within 480 --rest        a piece; call it again until it says that nothing is left
"""

import gc
import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from finetune.runtime.optional import lazily

with lazily():  # a process that divides tests among others has no need of it
    import torch

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "liger-kernel")
"""Whose versions are said with the results of a GPU."""

MARKS = (b"mark.gpu", b"ON_GPU", b"EVERY_DEVICE")
"""What a file of tests for a GPU has in its text; the others are not even imported."""

TIMEOUT_SECONDS = 240
"""For a test that says nothing of its time: the device is lent by the minute."""

_DEVICE = Path("/dev/nvidiactl")
_STARTED = pytest.StashKey[float]()


def is_wanted(config: pytest.Config) -> bool:
    """Tell whether this run is the one for a GPU."""
    return bool(config.getoption("-m") == "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--within", type=float, metavar="SECONDS", help="start no test later than this, and say what is left"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPU from tests that were written for a machine without one; what they start sees none either."""
    if not is_wanted(config) and _DEVICE.exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Have one process run the tests: one at a time has the device and its memory."""
    return 0 if is_wanted(config) else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files without a GPU test unread, which import most of the package."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    if not is_test or not is_wanted(config):
        return None
    text = collection_path.read_bytes()
    return None if any(mark in text for mark in MARKS) else True


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have what is cheap and tells most come first: the device itself, then this process, then what is launched."""
    if not is_wanted(config):
        return
    items.sort(key=_order)
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


def _order(item: pytest.Item) -> int:
    if item.path.name == "test_gpu.py":
        return 0
    is_launched = item.get_closest_marker("distributed") or {"launch", "begin"} & set(getattr(item, "fixturenames", ()))
    return 2 if is_launched else 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say on what the results were found, whatever becomes of the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if is_wanted(session.config) and torch.cuda.is_available() and reporter is not None:
        for name, value in machine().items():
            reporter.write_line(f"{name}: {value}")


def machine() -> dict[str, str]:
    """Return the device, its driver and the versions of what computes on it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if not torch.cuda.is_available():
        return {"device": "cpu", **found}
    properties = torch.cuda.get_device_properties(0)
    device = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"device": device, "driver": _driver(), "cuda": str(torch.version.cuda), "nccl": nccl, **found}


def _driver() -> str:
    try:
        import pynvml
    except ImportError:
        return "unknown without nvidia-ml-py"
    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End the run where its time, from the first test on, is over; what has not been started is left to the next."""
    limit = item.config.getoption("--within")
    started = item.config.stash.setdefault(_STARTED, time.monotonic())
    if limit is not None and time.monotonic() - started > limit:
        item.session.shouldstop = f"{limit:.0f} s are over: call it again with --figures FILE --rest for what is left"
        pytest.skip("no time left in this piece")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say in one line why nothing was run where there is no GPU."""
    if is_wanted(config) and not torch.cuda.is_available():
        count = len(terminalreporter.stats.get("skipped", ()))
        terminalreporter.write_line(f"{count} tests need a CUDA device, and torch {torch.__version__} sees none here.")


@pytest.fixture(autouse=True)
def freed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test on a GPU a device like new, and have it leave none of its memory to the next."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    settings = _settings()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_sync_debug_mode("default")
    _restore(settings)
    _free()


@pytest.fixture(autouse=True, scope="module")
def freed_with_the_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what the fixtures of a module kept on the device."""
    yield
    if is_wanted(request.config) and torch.cuda.is_available():
        _free()


def _free() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()


def _settings() -> dict[str, Any]:
    return {
        "products": torch.get_float32_matmul_precision(),
        "convolutions": torch.backends.cudnn.allow_tf32,
        "benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def _restore(settings: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision(settings["products"])
    torch.backends.cudnn.allow_tf32 = settings["convolutions"]
    torch.backends.cudnn.benchmark = settings["benchmark"]
    torch.use_deterministic_algorithms(settings["deterministic"])
    torch.set_default_dtype(settings["dtype"])
