"""The example of docs/how-to/plugins.md is complete, short, and does what the page says."""

import re
import sys
from pathlib import Path

import pytest

from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.registry.plugins import TABLES
from finetune.report.history import read_events
from tests.launching import capture
from tests.plugin_tables import unload_plugins
from tests.small_job import JOB, write_job

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "plugins.md").read_text(encoding="utf-8")


@pytest.fixture
def job(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (keys,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert 20 <= len(example.splitlines()) <= 30
    plugins, options, task, train = keys.splitlines()
    text = JOB.replace("task: {name: sft}", task).replace("  schedule: {name: cosine, warmup_steps: 2}\n", "")
    schedule = re.search(r"schedule: (\{.*?\})", train)[1]
    text = text.replace("  steps: 8\n", f"  steps: 8\n  schedule: {schedule}\n  callbacks: [my_watch]\n")
    path = write_job(tmp_path / "job", text=f"{plugins}\n{options}\n{text}")
    (path.parent / "my_plugin.py").write_text(example)
    yield path
    unload_plugins()


def test_a_wrong_option_of_the_example_is_reported_as_the_page_shows_it(job):
    job.write_text(job.read_text().replace("gamma", "gama"))
    with pytest.raises(ConfigError) as error:
        load_config(job)
    assert f"error: {error.value}\n" in PAGE


def test_every_group_and_every_decorator_is_on_the_page():
    from finetune import register

    assert all(f"`.{group}`" in PAGE or f"`finetune.{group}`" in PAGE for group in TABLES)
    decorators = set(register.__all__) - {"OptimizerState", "Request", "Section", "key"}
    assert all(f"| `{name}`" in PAGE for name in decorators) and len(decorators) == 11


@pytest.mark.full
def test_the_example_trains_and_its_callback_saves(job):
    ended = capture([sys.executable, "-m", "finetune", "--config", str(job)], timeout_seconds=300)
    assert ended.returncode == 0, ended.stderr
    events = read_events(job.parent / "runs/job/events.jsonl")
    rates = [event["learning_rate"] for event in events if event["event"] == "StepTaken"]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 1e-3, 1e-3, 1e-3, 1e-4, 1e-4])
    requests = [event["message"] for event in events if event["event"] == "Noted" and "my_watch" in event["message"]]
    assert requests[0] == "callback `my_watch` requests: save"
