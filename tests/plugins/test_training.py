"""What plugins add trains, watches, stops and resumes; their mistakes are one message each and lose nothing."""

import json
import re
import sys

import pytest

from finetune.report.history import read_events
from tests.launching import accelerate_command, capture
from tests.small_job import WORDS, write_job

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

MEAN = """
from finetune import register

@register.loss("mine")
def mine(log_probabilities, labels, batch):
    return -log_probabilities.{what}
"""

RANKS = """
import os
import re

from finetune import register

@register.callback("mine")
class Mine:
    def __call__(self, event):
        if type(event).__name__ == "StepTaken" and event.step == 2:
            return register.Request.SAVE if os.environ["RANK"] == "0" else register.Request.EVALUATE
"""


def train(job, *overrides, strategy=None):
    words = [word for override in overrides for word in ("--set", override)]
    if strategy is None:
        command = [sys.executable, "-m", "finetune", "--config", str(job), *words]
    else:
        command = accelerate_command(strategy, "-m", "finetune", "--config", str(job), *words)
    return capture(command, timeout_seconds=600)


def events(job, name):
    return [event for event in read_events(job.parent / "runs/job/events.jsonl") if event["event"] == name]


def test_everything_that_a_package_adds_is_used_by_one_job(installed, job):
    done = train(
        job,
        "data.train={source: counting, format: question_answer}",
        "data.chat_template=plain_turns",
        "task.loss=focal",
        "train.optimizer={name: sign_momentum}",
        "train.schedule={name: sawtooth}",
        "train.learning_rate=1e-3",
        "report.reporters=[line_file]",
        "evaluate.generate={metrics: [same_length], max_new_tokens: 4}",
        "train.callbacks=[watch_loss]",
        "plugin_options={focal: {gamma: 1.0}, sign_momentum: {decay: 0.8}, counting: {rows: 30}}",
        "plugin_options.watch_loss={evaluate_at: 2, save_at: 5}",
    )
    assert done.returncode == 0, done.stderr
    steps = events(job, "StepTaken")
    assert [step["learning_rate"] for step in steps[:5]] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-3])
    assert all(step["loss"] < step["metrics"]["cross_entropy"] for step in steps)
    evaluated, saved = ([event["step"] for event in events(job, name)] for name in ("Evaluated", "CheckpointSaved"))
    assert evaluated[1:] == [4, 8] and evaluated[0] in (2, 3)  # the counts of step 3 may have been under way
    assert saved[::2] == [4, 8] and saved[1] in (5, 6)
    assert 0.0 <= events(job, "Evaluated")[-1]["metrics"]["same_length"] <= 1.0
    lines = (job.parent / "runs/job/lines.txt").read_text().splitlines()
    assert lines[0] == "0 RunStarted" and lines[-1] == "8 RunEnded" and "5 StepTaken" in lines
    identity = json.loads(max((job.parent / "runs/job/checkpoints").glob("step-*/manifest.json")).read_text())["run"]
    assert {"plugins.focal", "plugins.sign_momentum", "plugins.counting", "plugins.plain_turns"} <= identity[
        "identity"
    ].keys()
    assert {"plugins.line_file", "plugins.watch_loss"} <= identity["settings"].keys()
    assert identity["identity"]["plugins.focal"].startswith("fancy-finetune 1.2.0 sha256 ")


def test_a_preference_loss_of_a_plugin_trains_with_its_reference(installed, tmp_path):
    text = (write_job(tmp_path / "job")).read_text()
    job = tmp_path / "job" / "job.yaml"
    job.write_text(text.replace("task: {name: sft}", "task: {name: preference, preference: {loss: capped_margin}}"))
    row = {"prompt": "reverse: red green", "chosen": "green red", "rejected": "red green"}
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / "job" / name).write_text("".join(json.dumps(row) + "\n" for _ in range(16)))
    done = train(job)
    assert done.returncode == 0, done.stderr
    losses = [step["loss"] for step in events(job, "StepTaken")]
    assert losses[0] == pytest.approx(1.3133, abs=1e-3) and losses[-1] < losses[0]  # softplus(1) at the reference


def test_a_changed_plugin_is_refused_on_a_resume_unless_it_is_allowed(job):
    (job.parent / "mine.py").write_text(MEAN.format(what="clone()"))
    words = ("plugins=[./mine.py]", "task.loss=mine")
    assert train(job, *words, "train.stop_after_steps=4").returncode == 0
    resumed = train(job, *words, "train.stop_after_steps=5")
    assert resumed.returncode == 0 and "resumes from" in resumed.stdout, resumed.stderr
    (job.parent / "mine.py").write_text(MEAN.format(what="clone() * 2"))
    refused = train(job, *words)
    assert refused.returncode == 2
    assert (
        "plugins.mine: mine.py sha256 " in refused.stderr
        and "checkpoint.allow_changes: [plugins.mine]" in refused.stderr
    )
    allowed = train(job, *words, "checkpoint.allow_changes=[plugins.mine]")
    assert allowed.returncode == 0, allowed.stderr
    assert "allowed by checkpoint.allow_changes: plugins.mine mine.py sha256 " in allowed.stdout


def test_a_callback_that_fails_is_a_warning_and_one_that_stops_can_be_resumed(installed, job):
    words = ("train.callbacks=[watch_loss]",)
    stopped = train(job, *words, "plugin_options={watch_loss: {stop_at: 3}}")
    assert stopped.returncode == 0, stopped.stderr
    assert events(job, "RunEnded")[-1]["reason"] == "callback" and events(job, "RunEnded")[-1]["step"] < 8
    resumed = train(job, *words, "plugin_options={watch_loss: {raise_at: 6}}")
    assert resumed.returncode == 0, resumed.stderr
    assert "changed since the checkpoint: plugin_options.watch_loss.stop_at 3 -> 0" in resumed.stdout
    (warning,) = [event for event in events(job, "Warned") if "callback" in event["message"]]
    assert warning["message"] == (
        "callback `watch_loss` failed and is disabled: ValueError: the callback of the tests fails"
    )
    assert events(job, "RunEnded")[-1]["reason"] == "finished"


def test_ranks_that_request_different_things_all_do_both_and_the_numbers_stay(job):
    (job.parent / "mine.py").write_text(RANKS)
    plain = train(job, strategy="ddp")
    assert plain.returncode == 0, plain.stderr
    expected = [(step["loss"], step["gradient_norm"]) for step in events(job, "StepTaken")]
    assert [event["step"] for event in events(job, "Evaluated")] == [4, 8]
    other = job.parent / "runs" / "other"
    watched = train(job, "plugins=[./mine.py]", "train.callbacks=[mine]", f"run.folder={other}", strategy="ddp")
    assert watched.returncode == 0, watched.stderr
    found = read_events(other / "events.jsonl")
    losses = [(event["loss"], event["gradient_norm"]) for event in found if event["event"] == "StepTaken"]
    assert losses == expected  # bitwise
    (evaluated, *_) = [event["step"] for event in found if event["event"] == "Evaluated"]
    (saved, *_) = [event["step"] for event in found if event["event"] == "CheckpointSaved"]
    assert evaluated == saved and saved in (2, 3)


def test_a_loss_that_returns_a_mean_is_one_message(job):
    (job.parent / "mine.py").write_text(MEAN.format(what="mean()"))
    ended = train(job, "plugins=[./mine.py]", "task.loss=mine")
    assert ended.returncode == 2
    found = "a tensor of shape [], which is a mean or a sum"
    assert re.match(rf"error: the loss `mine` .*returned {re.escape(found)}", ended.stderr)
    assert len(ended.stderr.splitlines()) == 1


def test_a_task_of_a_plugin_passes_the_plugin_test_under_four_strategies(installed, tmp_path):
    from tests.plugins.conftest import TEXT_JOB

    job = write_job(tmp_path / "job", text=TEXT_JOB)
    for name in ("train.jsonl", "held_out.jsonl"):
        words = [*WORDS]
        rows = [{"text": " ".join(words[number % 7 : number % 7 + 2 + number % 5])} for number in range(40)]
        (job.parent / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "finetune", "plugins", "test", "reversed_pretrain", "--config", str(job)]
    overrides = ("task.loss=focal", "plugin_options={reversed_pretrain: {by: words}, focal: {gamma: 1.5}}")
    words = [word for override in overrides for word in ("--set", override)]
    ended = capture([*command, "--steps", "4", *words], timeout_seconds=800)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [" ".join(line.replace("│", " ").split()) for line in ended.stdout.splitlines()]
    assert [row.split()[0] for row in rows if row.endswith(" equal")] == ["ddp", "fsdp2", "zero2", "zero3"]
    assert [row for row in rows if row.endswith("passed")] == [
        "audit passed",
        "parity on 2 processes passed",
        "resume after step 2 passed",
    ]
