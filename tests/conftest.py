"""What tests of several folders share: the two tiers, the processes among which they are divided, a small job file."""

import logging
import os
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import verifier_server
from tests.launching import ADDRESS, OWNER, SETTINGS

pytest_plugins = ["tests.gpu", "tests.figures", "tests.browser", "tests.refusals"]

ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))  # for started processes

MAX_WORKERS = 4
"""Each imports torch by itself, and a test may start four processes."""

JOB = """\
run:
  folder: runs/first
model:
  name: gpt2
data:
  train:
    path: rows.jsonl
  max_length: 64
task:
  name: sft
train:
  global_batch_size: 8
  microbatch_size: 4
  steps: 10
  learning_rate: 1e-4
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the whole suite: also the tests marked `full`")
    parser.addoption("--cold", action="store_true", help="start every process in a fresh interpreter, as users do")


def pytest_configure(config: pytest.Config) -> None:
    """Have all processes share the cores, and one server fork what the tests start; see tests/launching.py."""
    os.environ.update({name: value for name, value in SETTINGS.items() if name not in os.environ})
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist: the first process has set it up
        return
    os.environ[OWNER] = str(os.getpid())
    os.environ[ADDRESS] = os.environ[verifier_server.ADDRESS] = ""
    os.environ[verifier_server.OWNER] = str(os.getpid())
    if sys.platform == "linux" and not config.getoption("--cold"):
        folder = Path(tempfile.mkdtemp(prefix="finetune-tests-"))
        os.environ[ADDRESS] = str(folder / "warm")
        os.environ[verifier_server.ADDRESS] = str(folder / "verifier")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Divide a run of whole folders among processes; a file that is named is run in this one."""
    return 0 if _names_files(config) else min(os.cpu_count() or 1, MAX_WORKERS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `full` out unless requested; what starts processes comes first, as it takes longest."""
    if not config.getoption("--all") and not _names_files(config):
        left_out = [item for item in items if item.get_closest_marker("full") and not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("distributed") is None)


def _names_files(config: pytest.Config) -> bool:
    """Tell whether somebody has named files or single tests, and so means just them, to the last one."""
    return any(".py" in argument for argument in config.invocation_params.args)


@pytest.fixture(autouse=True)
def launch_variables_as_before() -> Iterator[None]:
    """Remove what Accelerate has written into the environment: the next test may start processes, which inherit it."""
    os.environ.pop("COLUMNS", None)  # without a terminal, tables are not cut
    before = set(os.environ)
    yield
    for name in os.environ.keys() - before:
        if name.startswith(("ACCELERATE_", "FSDP_")):
            del os.environ[name]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return the path of the small job; its rows lie beside it."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2", "completion": "4"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """The URL of a bucket on a real S3 server of this machine; processes that are started find it, too."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        request = urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200
        yield "s3://bucket"
    server.stop()
