"""The gate of classifiers, of models trained on pairs, and of those that it refuses."""

import random

import pytest

from finetune.errors import UserError
from tests.commands.gate.conftest import Gate
from tests.commands.gate.planted import FROM_CONFIG
from tests.scenarios.trained import train_here
from tests.small_job import write_rows

JOB = f"""
run: {{folder: runs/first}}
model:{FROM_CONFIG}
data:
  train: {{path: train.jsonl}}
  validation: {{path: held_out.jsonl}}
  max_length: 96
  cache_folder: cache
task: {{name: text_classification}}
train: {{global_batch_size: 8, microbatch_size: 8, steps: 30, learning_rate: 5e-3}}
evaluate: {{}}
report: {{console: plain}}
export: {{verify: false}}
"""
PAIRS = ("task.name=preference", "data.chat_template=chatml")
COLORS = ("red", "green", "blue", "pink")


@pytest.fixture
def train(tmp_path):
    """Return a function that trains on all but the last 40 rows and returns the folder of the run."""

    def run(rows, *overrides):
        random.Random(1).shuffle(rows)
        write_rows(tmp_path / "train.jsonl", rows[:-40])
        write_rows(tmp_path / "held_out.jsonl", rows[-40:])
        (tmp_path / "job.yaml").write_text(JOB)
        train_here(tmp_path / "job.yaml", *overrides)
        return tmp_path / "runs" / "first"

    return run


def pairs():
    return [
        {"prompt": f"say {one}", "chosen": one, "rejected": other}
        for one in COLORS
        for other in COLORS * 12
        if other != one
    ]


@pytest.mark.full
def test_a_classifier_is_compared_by_loss_and_accuracy(train, gate: Gate):
    chance = random.Random(2)
    rows = [{"text": " ".join([*chance.choices(COLORS, k=4), *[c] * 3]), "label": c} for c in COLORS * 40]
    run = train(rows)
    code, found = gate(run, general=None)
    assert (code, found["verdict"], found["share_name"], found["forgetting"]) == (0, "better", "accuracy", None)
    assert found["share"]["baseline"] < 0.7 < found["share"]["tuned"]
    assert {row["reference"] for row in found["rows"]} == set(COLORS)
    code, found = gate(run / "final", against=run, general=None)
    assert (code, found["verdict"], found["seen_differently"]) == (1, "no difference", [])
    with pytest.raises(UserError, match=r"--general: models of task `text_classification`"):
        gate(run)


@pytest.mark.full
def test_pairs_are_compared_by_their_loss_with_the_base_as_reference(train, gate: Gate):
    run = train(pairs(), *PAIRS)
    for source in (run, run / "final"):  # the full model in final/ is not its own reference
        code, found = gate(source, general=None)
        assert (code, found["verdict"], found["share_name"]) == (0, "better", "chosen answer more likely")
        assert found["loss"]["baseline"] == pytest.approx(0.693147, abs=1e-5)
        assert found["forgetting"] is None


@pytest.mark.full
def test_kto_has_no_losses_of_rows(train, gate: Gate):
    run = train(pairs(), *PAIRS, "task.preference={loss: kto}")
    with pytest.raises(UserError, match=r"task\.preference\.loss: `kto`"):
        gate(run, general=None)


@pytest.mark.full
def test_a_task_without_losses_of_rows_is_refused_by_name(train, gate: Gate):
    run = train(pairs(), "task.name=reward", PAIRS[1])
    with pytest.raises(UserError, match=r"task `reward` has no loss of a single row"):
        gate(run, general=None)
