"""The third party's package, installed into a folder of its own without a network, and a job that uses it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune.config.load import load_config
from tests.plugin_tables import unload_plugins
from tests.small_job import JOB, write_job

PACKAGE = Path(__file__).parent / "fancy_finetune"

TEXT_JOB = JOB.replace("task: {name: sft}", "task: {name: reversed_pretrain}").replace("  chat_template: chatml\n", "")
"""The small job with the task of the package."""


def install(source: Path, into: Path, *, work: Path) -> None:
    """Install a package as pip does from its source."""
    copied = work / source.name
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(into), str(copied)], check=True, timeout=300)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `fancy-finetune` is installed."""
    folder = tmp_path_factory.mktemp("site") / "packages"
    install(PACKAGE, folder, work=tmp_path_factory.mktemp("source"))
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package can be imported, here and in processes that are started; nothing of it is left behind."""
    unload_plugins()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]))
    yield site
    unload_plugins()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fancy_finetune"]:
        del sys.modules[name]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The small job: its text can be changed."""
    return write_job(tmp_path / "job")


@pytest.fixture
def load(job: Path) -> Callable[..., object]:
    """Load the small job with overrides."""
    return lambda *overrides: load_config(job, overrides)
