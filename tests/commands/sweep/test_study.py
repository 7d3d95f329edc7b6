"""A sweep is continued from its journal: the same runs are proposed, damage is one message."""

import json
import os
import time
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution

from finetune.commands.sweep.axes import contains, value_text
from finetune.commands.sweep.results import Objective
from finetune.commands.sweep.runs import FAILED, FINISHED, INTERRUPTED, WAITING, SweepRun
from finetune.commands.sweep.study import SweepStudy, lock_sweep
from finetune.config.load import load_config
from finetune.errors import UserError
from tests.refusals import refused


def choices(*values):
    return CategoricalDistribution(list(map(value_text, values)))


def log_range(low, high):
    return FloatDistribution(low, high, log=True)


SPACE = {"train.learning_rate": log_range(1e-5, 1e-1), "train.schedule.name": choices("cosine", None, [1])}
LOSS = Objective("loss", True)


@pytest.fixture
def opened(job, tmp_path):
    """Return a function that opens the sweep's study as a new call of the command does."""

    def open_study(*, space=SPACE, overrides=(), objective=LOSS, is_search=False):
        (tmp_path / "sweep").mkdir(exist_ok=True)
        study = SweepStudy(tmp_path / "sweep", space=space, seed=3)
        study.begin(load_config(job, overrides).config, objective=objective, is_search=is_search)
        return study

    return open_study


def run_of(study, name):
    return SweepRun(name, study.runs[name].values, (), study.folder)


def write_events(run, losses):
    run.folder.mkdir(parents=True, exist_ok=True)
    events = [
        {"event": "Evaluated", "step": step, "num_rows": 4, "metrics": {"loss": loss}, "seconds": 0.1}
        for step, loss in losses.items()
    ]
    (run.folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def finish(study, name, losses, *, state="finished"):
    """Have the run end with these evaluations, by step; return its outcome."""
    run = run_of(study, name)
    study.start(run)
    write_events(run, losses)
    error = {"type": "NonFiniteError", "message": "it broke"}
    status = {"state": state, "time": time.time(), "step": 8, "num_steps": 8, "error": error}
    (run.folder / "status.json").write_text(json.dumps(status))
    return study.end(run)


def search(study, *, num_runs):
    """Search up to this number of runs, their loss being the learning rate; return the names in order."""
    while len(study.runs) < num_runs:
        record = study.propose()
        finish(study, record.name, {8: record.values["train.learning_rate"]})
    return list(study.runs)


def test_an_interrupted_search_proposes_the_same_runs_as_an_undisturbed_one(opened, tmp_path):
    straight = opened()
    names = search(straight, num_runs=14)
    assert len(set(names)) == 14
    assert {str(run.values["train.schedule.name"]) for run in straight.runs.values()} == {"cosine", "None", "[1]"}
    (tmp_path / "sweep").rename(tmp_path / "straight")
    for number in (4, 11):
        study = opened()
        search(study, num_runs=number)
        record = study.propose()
        name, values = record.name, record.values
        study.start(run_of(study, name))  # and here the sweep is killed
        study = opened()
        assert study.outcome(name).state in (INTERRUPTED, WAITING)
        finish(study, name, {8: values["train.learning_rate"]})
    assert search(opened(), num_runs=14) == names


def test_a_run_that_ended_while_the_sweep_was_killed_is_recorded_by_the_next_call(opened):
    study = opened()
    name = study.propose().name
    study.start(run_of(study, name))
    write_events(run_of(study, name), {4: 2.0, 8: 1.5})
    status = {"state": "finished", "time": time.time(), "step": 8, "num_steps": 8}
    (run_of(study, name).folder / "status.json").write_text(json.dumps(status))
    assert opened().outcome(name).state == FINISHED
    (trial,) = trials(study.folder)
    assert (trial.state, trial.value) == (optuna.trial.TrialState.COMPLETE, 1.5)


def trials(folder):
    """Read the journal as `optuna-dashboard` does."""
    backend = optuna.storages.journal.JournalFileBackend(str(folder / "sweep.journal"))
    study = optuna.load_study(storage=optuna.storages.JournalStorage(backend), study_name="sweep")
    return study.get_trials()


def test_a_failed_run_that_is_started_again_gets_a_new_trial_and_keeps_its_name(opened):
    study = opened()
    name = study.propose().name
    assert finish(study, name, {}, state="failed").state == FAILED
    assert finish(study, name, {8: 1.0}).state == FINISHED
    study = opened()
    assert list(study.runs) == [name] and study.outcome(name).state == FINISHED
    states = [trial.state.name for trial in trials(study.folder)]
    assert states == ["FAIL", "COMPLETE"]


def test_a_search_continues_with_other_ranges_and_choices(opened):
    search(opened(), num_runs=12)
    spaces = [
        {"train.learning_rate": log_range(1e-3, 1e-2), "train.schedule.name": choices("cosine", "constant")},
        {"train.learning_rate": FloatDistribution(1e-3, 1.0), "train.schedule.name": choices("cosine", "constant")},
    ]
    for number, space in enumerate(spaces, start=1):
        study = opened(space=space)
        name = search(study, num_runs=12 + number)[-1]
        values = study.runs[name].values
        assert all(contains(domain, values[key]) for key, domain in space.items())


def test_a_search_with_another_metric_is_refused(opened):
    opened(is_search=True)
    with refused(UserError, "--metric", "--metric loss"):
        opened(objective=Objective("accuracy", False), is_search=True)


def test_the_name_of_a_run_of_a_search_is_its_number_and_its_rounded_values(opened):
    record = opened(space={"train.learning_rate": log_range(1e-5, 1e-1)}).propose()
    assert record.name == f"000,learning_rate={float(format(record.values['train.learning_rate'], '.4g')):g}"


def test_the_runs_of_a_grid_are_read_back_in_their_order_without_secrets(opened):
    space = {"report.project": choices("a", "--password=hunter22", "b")}
    study = opened(space=space)
    for name in "zya":
        study.add(SweepRun(name, {"report.project": "--password=hunter22"}, (), study.folder))
    assert list(opened(space=space).runs) == ["z", "y", "a"]
    assert "hunter22" not in (study.folder / "sweep.journal").read_text()


def test_a_changed_job_is_refused_by_the_names_of_its_keys(opened):
    opened()
    with refused(UserError, "train.steps: `10`", "`20`", "train.optimizer.weight_decay"):
        opened(overrides=["train.steps=20", "train.optimizer.weight_decay=0.3"])
    with refused(UserError, "`train.learning_rate` and `train.schedule.name`"):
        opened(space={**SPACE, "train.steps": choices(10, 20)}, overrides=["train.steps=20"])


@pytest.mark.parametrize("text", ["{\n", "[]\n", '{"op_code": 1}\n', "null\n", "[" * 5000 + "\n", "\x00\n"])
def test_a_damaged_journal_is_rejected_with_a_remedy(tmp_path, text):
    (tmp_path / "sweep.journal").write_text(text)
    with refused(UserError):
        SweepStudy(tmp_path, space=SPACE)


def test_a_name_that_leads_out_of_the_folder_is_damage(opened):
    study = opened()
    search(study, num_runs=1)
    (name,) = study.runs
    path = study.folder / "sweep.journal"
    text = path.read_text()
    assert f'"name":"{name}"' in text
    for hostile in ("../../elsewhere", "/etc", "a/b", "..", ""):
        path.write_text(text.replace(f'"name":"{name}"', f'"name":"{hostile}"'))
        with refused(UserError):
            opened()


def test_a_line_that_was_cut_off_by_a_kill_is_dropped(opened):
    study = opened()
    search(study, num_runs=3)
    path = study.folder / "sweep.journal"
    os.truncate(path, path.stat().st_size - 5)
    assert len(search(opened(), num_runs=5)) == 5
    assert len(trials(study.folder)) == 5


def test_two_sweeps_cannot_use_one_folder_at_once(tmp_path):
    with (
        lock_sweep(tmp_path),
        refused(UserError, "`finetune sweep`"),
        lock_sweep(tmp_path),
    ):
        pass
    with lock_sweep(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_is_refused():
    with refused(UserError), lock_sweep(Path("/proc/none/sweep")):
        pass
