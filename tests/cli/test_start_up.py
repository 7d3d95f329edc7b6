"""How fast and how light the command line starts, seen in fresh processes."""

import resource

import pytest

HEAVY = ("torch", "transformers", "numpy", "accelerate", "datasets", "peft")


def imported(said: str) -> set[str]:
    """Return the modules in the output of `python -X importtime`."""
    return {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("words", [("--help",), ("check", "JOB")])
def test_no_torch_is_imported(python, job, words):
    words = [str(job) if word == "JOB" else word for word in words]
    done = python("-X", "importtime", "-m", "finetune", *words)
    modules = imported(done.stderr)
    assert done.returncode == 0
    assert "finetune.cli.app" in modules  # it looked at something
    assert [name for name in HEAVY if name in modules] == []
    assert "check" in words or "pydantic" not in modules


def test_help_answers_at_once(python):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python("-m", "finetune", "--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # busy neighbors do not count
    assert seconds < 0.5, f"it took {seconds:.2f} s of processor time; see `python -X importtime`"


def test_a_bad_job_shows_no_traceback(python, job):
    done = python("-m", "finetune", "--config", job, "--set", "train.steps=ten")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: job.yaml has 1 problem\n")
    assert "Traceback" not in done.stderr
