"""`finetune plan` as it is typed: mistakes are one message and exit code 2."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.commands.plan.conftest import JOB, SHAPES

Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"text": "a row"}\n')
    path = tmp_path / "job.yaml"
    path.write_text(JOB.format(lora="", **SHAPES["125m"]))
    return path


def one_error(answer: tuple[int, str, str]) -> str:
    """Return the message of a user's mistake: exit code 2, nothing on standard output, no traceback."""
    code, out, err = answer
    assert (code, out) == (2, "") and "Traceback" not in err
    assert err.count("error: ") == 1
    return err[err.index("error: ") :]


def test_a_job_whose_model_cannot_be_reached_is_refused(typed: Typed, job: Path):
    text = job.read_text()
    head, tail = text[: text.index("  from_config:")], text[text.index("  dtype:") :]
    job.write_text(f"{head}  name: nobody/no-such-model\n{tail}")
    assert "nobody/no-such-model" in one_error(typed("plan", "--config", job, "--gpus", "T4"))


@pytest.mark.parametrize("option", ["--prices", "--gpu-table"])
def test_a_table_that_cannot_be_read_is_named(typed: Typed, job: Path, option: str):
    error = one_error(typed("plan", "--config", job, "--gpus", "T4", option, job.parent / "none.yaml"))
    assert "none.yaml: this table cannot be read" in error
