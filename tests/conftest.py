"""What tests of several folders share: a small job file that keeps every rule."""

from pathlib import Path

import pytest

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
