"""`finetune prepare` in this process: made once, found again, stopped and gone on with."""

import json
import signal

import pytest

from finetune.commands.prepare import SECONDS_BETWEEN_LINES, ProgressLines, prepare
from finetune.config.load import load_config
from finetune.data.token_cache import cache, chunks
from finetune.errors import ConfigError, DataError
from finetune.report.reporter import RunLog
from finetune.run.setup.training_data import make_run_plan, make_training_data
from finetune.runtime.supervision.heartbeat import VARIABLE

JOB = """
run: {folder: run, seed: 3}
model:
  from_config: {model_type: llama, values: {hidden_size: 8, num_hidden_layers: 1, num_attention_heads: 1}}
  tokenizer: {train: {vocabulary_size: 330}}
data:
  train: {path: rows.jsonl, format: prompt_completion}
  validation: {fraction: 0.2}
  max_length: 64
  over_length: split
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train: {global_batch_size: 4, microbatch_size: 2, steps: 2, learning_rate: 1e-3}
evaluate: {every_steps: 2}
"""


@pytest.fixture
def job(tmp_path):
    rows = [{"prompt": f"Say {n}", "completion": "one more word " * n} for n in range(1, 21)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path / "job.yaml"


@pytest.fixture
def prepared(job, capsys):
    """Return a function that prepares the job with overrides and returns what was said."""

    def run(*overrides):
        prepare(job, overrides)
        return capsys.readouterr().out.splitlines()

    return run


def test_both_sets_are_made_and_then_found(prepared, tmp_path):
    said = prepared()
    assert any(line.startswith("data.train: prepared in") for line in said)
    assert any(line.startswith("data.validation: prepared in") for line in said)
    assert any(line.startswith("data.train: split into windows: ") for line in said)
    assert any(line.startswith("data.train ") for line in said), "the audit's table"
    assert said[-1] == "training with this job will reuse the tokenized data"
    assert not (tmp_path / "run").exists()
    said = prepared()
    assert sum("already prepared in" in line for line in said) == 2
    assert not any(": prepared in" in line for line in said)


COUNTS = [
    ("train.schedule={warmup_steps: 9}", "train.schedule.warmup_steps"),
    ("train.average={after_steps: 9}", "train.average.after_steps"),
    ("train.unfreeze=[{patterns: ['lm_head.*'], after_steps: 9}]", "train.unfreeze.0.after_steps"),
    ("report.profile={start: 10}", "report.profile.start"),
]


@pytest.mark.parametrize("budget", ["train.epochs=1", "train.tokens=100"])
@pytest.mark.parametrize(("written", "key"), COUNTS)
def test_steps_beyond_those_of_epochs_or_tokens_are_refused_once_the_data_is_known(job, budget, written, key):
    overrides = ["data.over_length=drop", "train.steps=null", budget, written]
    loaded = load_config(job, overrides)
    with pytest.raises(ConfigError) as refused:
        prepare(job, overrides)
    (problem,) = refused.value.problems
    training_data = make_training_data(loaded.config, RunLog(is_main=False), locations=loaded.sources)
    num_steps = make_run_plan(load_config(job, overrides[:-1]), training_data).num_steps
    assert (problem.key, problem.source) == (key, f"--set {written}")
    assert 0 < num_steps < 9 and f"the run has {num_steps} steps" in problem.message
    with pytest.raises(ConfigError, match=key):  # as `finetune train` and `plan`
        make_run_plan(loaded, training_data)


def test_an_exceeded_audit_limit_stops_prepare_after_printing_the_audit(job, capsys):
    with pytest.raises(DataError, match=r"training with this job would stop here: data\.train: .*max_truncated_rows"):
        prepare(job, ["data.audit.max_truncated_rows=0.1"])
    assert "targets" in capsys.readouterr().out


@pytest.fixture
def interruptible():
    """Let Ctrl-C interrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_during_prepare_reports_that_progress_is_saved(job, capsys, monkeypatch):
    monkeypatch.setattr(chunks, "ROWS_PER_CHUNK", 2)
    monkeypatch.setattr(cache, "CHUNKS_PER_FILE", 2)
    monkeypatch.setenv(VARIABLE, "prepare.write step=4 do=interrupt")
    with pytest.raises(KeyboardInterrupt):
        prepare(job, [])
    assert "Progress is saved. Run the same command to resume." in capsys.readouterr().err
    monkeypatch.delenv(VARIABLE)
    prepare(job, [])
    assert "data.train: 4 rows are already tokenized; resuming from there" in capsys.readouterr().out


class Clock:
    """Tells the seconds that it was set to."""

    now = 0.0

    def __call__(self):
        return self.now


def test_a_line_comes_every_few_seconds():
    clock, said = Clock(), []
    lines = ProgressLines(log=said.append, clock=clock)
    for second in range(0, 25):
        clock.now = float(second)
        lines("data.train", 100 * second, 4000)
    assert SECONDS_BETWEEN_LINES == 10.0
    assert said == [
        "data.train: 1,000 of 4,000 rows (25%), 100 rows/s, 30 s left",
        "data.train: 2,000 of 4,000 rows (50%), 100 rows/s, 20 s left",
    ]


def test_rows_that_were_there_before_do_not_count_as_fast():
    clock, said = Clock(), []
    lines = ProgressLines(log=said.append, clock=clock)
    for seconds, rows in ((5.0, 1000), (25.0, 2000)):
        clock.now = seconds
        lines("data.train", rows, None)
    assert said == ["data.train: 2,000 rows, 50 rows/s"]
