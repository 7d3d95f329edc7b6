"""What tests of several folders share: a small job file that keeps every rule."""

import logging
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))  # for started processes

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
