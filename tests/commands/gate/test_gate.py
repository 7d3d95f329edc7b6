"""The release gate on small models whose faults are known: the verdict, its reasons and the JSON file."""

import json
from contextlib import ExitStack

import numpy as np
import pytest

from finetune.commands.evaluate import evaluate
from finetune.commands.export import export
from finetune.commands.gate import gate as release_gate
from finetune.commands.gate.comparison import compare_models
from finetune.commands.gate.differences import loss_difference
from finetune.errors import UserError
from finetune.runtime import distributed
from tests.commands.gate.conftest import Gate
from tests.commands.gate.planted import FROM_CONFIG, read_result
from tests.launching import accelerate_command, capture
from tests.runtime.test_resources import no_file_larger_than
from tests.scenarios.trained import forget, stay


def test_a_well_trained_run_passes_with_its_figures_and_rows(planted, gate: Gate, tmp_path, monkeypatch, capsys):
    run = planted.run("good")
    code, found = gate(run)
    assert (code, found["passes"], found["verdict"], found["failures"]) == (0, True, "better", [])
    loss, share, forgetting = found["loss"], found["share"], found["forgetting"]
    assert 0.3 < loss["low"] < loss["gain"] < loss["high"] and share["tuned"] > share["baseline"]
    assert (forgetting["num_rows"], forgetting["num_left_out"]) == (40, 0)
    assert 0 < forgetting["tokens_changed"] < 0.3 and forgetting["tokens_changed"] < forgetting["answers_changed"]
    assert len(found["rows"]) == 100
    total = sum(row["num_targets"] for row in found["rows"])
    assert sum(row["num_targets"] * row["tuned_loss"] for row in found["rows"]) / total == pytest.approx(loss["tuned"])
    monkeypatch.setattr(distributed, "shut_down", stay)
    evaluate(run, step=None, config=None, overrides=(), json=tmp_path / "metrics.json")
    forget()
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]["loss"] == pytest.approx(loss["tuned"], 1e-5)
    gains = [row["baseline_loss"] - row["tuned_loss"] for row in found["rows"]]
    assert gains == sorted(gains)
    assert "Better: the loss is lower by more than 0.01." in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.distributed
def test_the_result_is_the_same_each_time_and_on_three_processes(planted, gate: Gate, tmp_path):
    run = planted.run("untrained")
    again = gate(run)
    assert gate(run) == again
    words = ["-m", "finetune", "evaluate", str(run), "--against", "base", "--general", str(planted.general)]
    command = accelerate_command("ddp", *words, "--json", str(tmp_path / "ranks.json"), processes=3)
    done = capture(command, timeout_seconds=300.0)
    assert (done.returncode, read_result(tmp_path / "ranks.json")) == again, done.stderr


def test_a_run_that_has_not_trained_is_no_different_from_its_base(planted, gate: Gate):
    code, found = gate(planted.run("untrained"))
    assert (code, found["verdict"]) == (1, "no difference")
    assert (found["loss"]["low"], found["loss"]["high"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert (found["forgetting"]["answers_changed"], found["forgetting"]["tokens_changed"]) == (0.0, 0.0)


def test_a_report_that_cannot_be_written_is_noticed_before_the_model_is_loaded(gate: Gate, tmp_path):
    (tmp_path / "gate.json").mkdir()
    with pytest.raises(OSError, match=r"Is a directory: '.*gate\.json'"):
        gate(tmp_path / "no run")


def test_a_full_disk_costs_the_report_only(planted, gate: Gate, tmp_path, monkeypatch, capsys):
    (tmp_path / "gate.json").write_text("older")
    with ExitStack() as full_disk:

        def compare_and_fill_the_disk(*arguments, **options):
            comparison = compare_models(*arguments, **options)
            full_disk.enter_context(no_file_larger_than(1000))
            return comparison

        monkeypatch.setattr(release_gate, "compare_models", compare_and_fill_the_disk)
        with pytest.raises(UserError, match=f"may not grow further.*{tmp_path} has .* free"):
            gate(planted.run("untrained"))
    assert "No difference: the losses differ by less than 0.01." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["gate.json"]
    assert (tmp_path / "gate.json").read_text() == "older"


@pytest.mark.parametrize("override", ["data.chat_template=zephyr", "data.train_on=all"])
def test_rows_that_were_seen_otherwise_in_training_make_the_models_incomparable(planted, gate: Gate, override):
    code, found = gate(planted.run("good"), override)
    assert (code, found["verdict"], len(found["seen_differently"])) == (1, "not comparable", 1)
    assert "100 of 100 differ" in found["failures"][0] and "held_out.jsonl, row 1" in found["failures"][0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "verdict", "forgets"),
    [
        ("wrong turns", "worse", True),
        ("high rate", "worse", True),
        ("overfitted", "worse", True),
        ("leaked", "worse", True),
        ("forgetful", "better", True),
        ("adapter", "better", False),
    ],
)
def test_each_planted_fault_gets_its_verdict(planted, gate: Gate, name, verdict, forgets):
    code, found = gate(planted.run(name))
    assert (found["verdict"], any("Forgets" in text for text in found["failures"])) == (verdict, forgets)
    assert code == int(verdict != "better" or forgets)


@pytest.mark.full
def test_a_tiny_gain_counts_only_if_it_is_above_the_margin(planted, gate: Gate):
    run = planted.run("tiny")
    assert gate(run, margin=0.0)[1]["verdict"] == "better"
    code, found = gate(run, margin=0.05)
    assert (code, found["verdict"]) == (1, "no difference")
    assert 0 < found["loss"]["low"] < found["loss"]["high"] < 0.05


@pytest.mark.full
def test_a_merged_export_is_no_different_from_its_run(planted, gate: Gate, tmp_path):
    run = planted.run("adapter")
    export(run, step=None, to=tmp_path / "merged", dtype=None, merge=True, push_to_hub=None)
    job = run.parents[1] / "job.yaml"
    code, found = gate(tmp_path / "merged", against=run, config=job)
    assert (code, found["verdict"], found["seen_differently"]) == (1, "no difference", [])
    assert found["loss"]["gain"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.full
def test_a_model_with_another_vocabulary_is_refused(planted, gate: Gate):
    small = "model.tokenizer.train.vocabulary_size=400"
    other = planted.train("other vocabulary", planted.new[:64], small, model=FROM_CONFIG, steps=2, rate=1e-3)
    with pytest.raises(UserError, match=r"another vocabulary \(\d+ tokens in place of \d+\)"):
        gate(planted.run("untrained"), against=other)


@pytest.mark.full
def test_at_most_5_percent_of_models_without_a_difference_are_called_better_or_worse(planted, gate: Gate):
    rows = gate(planted.run("good"), f"data.validation.path={planted.new_rows}")[1]["rows"]
    assert len(rows) == 500
    num_targets = np.array([float(row["num_targets"]) for row in rows])
    baseline, tuned = (np.array([row[name] for row in rows]) for name in ("baseline_loss", "tuned_loss"))
    tuned += ((baseline - tuned) * num_targets).sum() / num_targets.sum()  # the same mean over all rows
    verdicts = []
    for seed in range(20):
        random = np.random.default_rng(seed)
        for _ in range(10):  # 20 verdicts alone could not tell 5% from 10%
            drawn = random.choice(len(rows), 100, replace=False)
            sums = [losses[drawn] * num_targets[drawn] for losses in (baseline, tuned)]
            verdicts.append(loss_difference(*sums, num_targets[drawn]).verdict(0.01))
    assert len(verdicts) == 200 and sum(verdict in ("better", "worse") for verdict in verdicts) <= 10
