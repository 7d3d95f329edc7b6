"""A search proposes the same runs whether it was interrupted or not, and gives up what is worse than the median."""

import json

import pytest

from finetune.commands.sweep.results.ranking import Objective, RunResult
from finetune.commands.sweep.running.history import RunHistory
from finetune.commands.sweep.state.outcome import FAILED, FINISHED, INTERRUPTED, PRUNED, Outcome
from finetune.commands.sweep.study.space import Choices, Range
from finetune.commands.sweep.study.study import SearchStudy, trial_name
from finetune.errors import MissingPackage

pytest.importorskip("optuna")

SPACE = {"train.learning_rate": Range(1e-5, 1e-1, True), "train.schedule.name": Choices(("cosine", None, [1]))}
LOSS = Objective("loss", True)


def history_of(tmp_path, losses):
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    events = [{"event": "Evaluated", "step": step, "metrics": {"loss": loss}} for step, loss in losses.items()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    history = RunHistory(path)
    history.read_new()
    return history


def result_of(name, values, tmp_path, *, final, state=FINISHED):
    return RunResult(name, values, (), tmp_path, Outcome(state), final, final, 1, 1, 1.0, None)


def search(tmp_path, *, num_runs, results=(), open_runs=()):
    """Run a search after these results, its loss being the learning rate; return all results in order."""
    study = SearchStudy(SPACE, LOSS, seed=3, folder=tmp_path)
    none = history_of(tmp_path, {})
    for each in results:
        study.restore(each, none, is_due=each.name in open_runs)
    results = [each for each in results if each.name not in open_runs]
    trials = [(each.name, each.values) for each in open_runs.values()] if open_runs else []
    while len(results) + len(trials) > len(results) or study.num_trials < num_runs:
        name, values = trials.pop(0) if trials else study.next_trial()
        results = [*results, result_of(name, values, tmp_path, final=values["train.learning_rate"])]
        study.end(results[-1], none)
    return results


def test_an_interrupted_search_goes_on_as_if_it_had_not_been(tmp_path):
    straight = search(tmp_path, num_runs=14)
    assert len({each.name for each in straight}) == 14
    assert {str(each.values["train.schedule.name"]) for each in straight} == {"cosine", "None", "[1]"}
    cut = straight[:11]
    going = {cut[10].name: cut[10]}
    cut[10] = result_of(cut[10].name, cut[10].values, tmp_path, final=None, state=INTERRUPTED)
    assert search(tmp_path, num_runs=14, results=cut, open_runs=going) == straight


def test_runs_of_another_space_failed_and_pruned_ones_are_counted(tmp_path):
    study = SearchStudy(SPACE, LOSS, seed=3, folder=tmp_path)
    inside = {"train.learning_rate": 1e-3, "train.schedule.name": None}
    outside = {"train.learning_rate": 1.0, "train.schedule.name": None}
    none = history_of(tmp_path, {})
    study.restore(result_of("a", outside, tmp_path, final=1.0), none, is_due=False)
    study.restore(result_of("b", outside, tmp_path, final=None, state=INTERRUPTED), none, is_due=True)
    study.restore(result_of("c", inside, tmp_path, final=None, state=FAILED), none, is_due=False)
    study.restore(result_of("d", inside, tmp_path, final=2.0, state=PRUNED), none, is_due=False)
    study.restore(result_of("e", inside, tmp_path, final=float("nan")), none, is_due=False)
    assert study.num_trials == 5
    assert not study.is_open("b")


def test_a_run_worse_than_the_median_is_given_up(tmp_path):
    study = SearchStudy(SPACE, LOSS, seed=3, folder=tmp_path)
    for number in range(4):
        history = history_of(tmp_path, {2: 1.0 + number, 4: 0.5 + number})
        name, values = study.next_trial()
        assert not study.is_hopeless(name, history)
        study.end(result_of(name, values, tmp_path, final=0.5 + number), history)
    good, _ = study.next_trial()
    bad, _ = study.next_trial()
    assert not study.is_hopeless(good, history_of(tmp_path, {2: 1.2}))
    assert not study.is_hopeless(bad, history_of(tmp_path, {}))
    assert study.is_hopeless(bad, history_of(tmp_path, {2: 9.0}))


def test_names_are_short():
    assert trial_name({"train.learning_rate": 0.00012345678}, 3) == "003,learning_rate=0.0001235"


def test_without_optuna_one_message_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(MissingPackage, match=r"pip install 'finetune\[search\]'"):
        SearchStudy(SPACE, LOSS, seed=0, folder=tmp_path)
