"""The example of docs/how-to/plugins.md is complete, short, and does what the page says."""

import re
import sys
from pathlib import Path

import pytest

from finetune.config.load import load_config
from finetune.errors import ConfigError
from finetune.registry.plugins import TABLES
from finetune.report.history import read_events
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import make_training_data
from tests.launching import capture
from tests.plugin_tables import unload_plugins
from tests.small_job import JOB, write_job

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "plugins.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
KEYS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def job(tmp_path):
    (example, _), (keys, _) = EXAMPLES, KEYS
    assert 20 <= len(example.splitlines()) <= 30
    plugins, options, task, train = keys.splitlines()
    text = JOB.replace("task: {name: sft}", task).replace("  schedule: {name: cosine, warmup_steps: 2}\n", "")
    schedule = re.search(r"schedule: (\{.*?\})", train)[1]
    text = text.replace("  steps: 8\n", f"  steps: 8\n  schedule: {schedule}\n  callbacks: [my_watch]\n")
    path = write_job(tmp_path / "job", text=f"{plugins}\n{options}\n{text}")
    (path.parent / "my_plugin.py").write_text(example)
    yield path
    unload_plugins()


@pytest.fixture
def task_job(tmp_path):
    """The small job with the page's task, which lies next to it."""
    plugins, options, task = KEYS[1].splitlines()
    text = JOB.replace("task: {name: sft}", task)
    path = write_job(tmp_path / "job", text=f"{plugins}\n{options}\n{text}")
    (path.parent / "my_task.py").write_text(EXAMPLES[1])
    yield path
    unload_plugins()


def test_the_task_of_the_page_trains_on_the_end_of_each_answer(task_job):
    targets = {}
    for num_tokens in (4, 1, 1000):
        loaded = load_config(task_job, [f"plugin_options.my_answer_end.num_tokens={num_tokens}"])
        samples = make_training_data(loaded.config, RunLog(is_main=False)).training.samples
        targets[num_tokens] = [samples[number].arrays["is_target"] for number in range(50)]
    whole = targets[1000]
    assert min(each.sum() for each in whole) >= 2 and max(each.sum() for each in whole) > 4
    for num_tokens in (4, 1):
        for mine, every in zip(targets[num_tokens], whole, strict=True):
            assert mine.nonzero()[0].tolist() == every.nonzero()[0].tolist()[-num_tokens:]


def test_a_constructor_of_a_task_may_take_its_options(task_job):
    plugin = task_job.parent / "my_task.py"
    constructor = (
        "    def __init__(self, context, *, options):\n"
        "        super().__init__(context)\n"
        "        self.num_tokens = options.num_tokens\n\n"
    )
    text = plugin.read_text().replace("    def encode_row", constructor + "    def encode_row")
    plugin.write_text(text.replace("self.options.num_tokens", "self.num_tokens"))
    loaded = load_config(task_job)
    samples = make_training_data(loaded.config, RunLog(is_main=False)).training.samples
    assert max(samples[number].arrays["is_target"].sum() for number in range(50)) == 4


@pytest.mark.full
def test_the_task_of_the_page_trains_evaluates_and_exports(task_job):
    ended = capture([sys.executable, "-m", "finetune", "--config", str(task_job)], timeout_seconds=300)
    assert ended.returncode == 0, ended.stderr
    steps = [event for event in read_events(task_job.parent / "runs/job/events.jsonl") if event["event"] == "StepTaken"]
    assert len(steps) == 8 and {step["num_targets"] for step in steps} <= set(range(8, 33))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert (task_job.parent / "runs/job/final/config.json").is_file()


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
