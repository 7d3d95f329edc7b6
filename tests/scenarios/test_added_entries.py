"""What was added by an entry of the registry and its implementation alone trains, moves and resumes like the rest."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.task_cases import CASES
from tests.task_cases.runs import Left, launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(900)]

ADDED = {
    "lion": ("groups", "train.optimizer={name: lion, weight_decay: 0.1}"),
    "apo_zero": ("dpo", "task={name: preference, preference: {loss: apo_zero, beta: 0.5}}"),
}
"""From the name of an entry to a case and what makes it use the entry."""

SETTINGS = ("train.learning_rate=1e-4", "export.verify=false")


@pytest.fixture(scope="module")
def cases():
    named = {case.name: case for case in CASES}
    return [replace(named[name], variants={entry: (key, *SETTINGS)}) for entry, (name, key) in ADDED.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cases) -> Path:
    place = tmp_path_factory.mktemp("added")
    prepare(cases, place)
    return place


@pytest.fixture(scope="module")
def launched(folder, cases):
    """Launch the jobs of all entries, stopped after some steps where asked; return what each has left behind."""

    def start(strategy: str | None, *, name: str, stop_after: int | None = None) -> dict[str, Left]:
        more = () if stop_after is None else (f"train.stop_after_steps={stop_after}",)
        runs = [
            (replace(case, variants={entry: (*overrides, *more)}), entry)
            for case in cases
            for entry, overrides in case.variants.items()
        ]
        return {entry: left for (_, entry), left in launch(strategy, runs, folder, name=name).items()}

    return start


@pytest.fixture(scope="module")
def straight(launched):
    return launched(None, name="straight")


@pytest.fixture(scope="module")
def moved(launched):
    """Runs that are begun under FSDP2 on two ranks and resume under ZeRO-2."""
    launched("fsdp2", name="moved", stop_after=2)
    return launched("zero2", name="moved")


@pytest.mark.parametrize("entry", ADDED)
def test_the_losses_of_a_run_that_changes_its_strategy_are_those_of_one_process(straight, moved, entry):
    assert moved[entry].error is None
    assert len(straight[entry].losses) == 4
    assert moved[entry].losses == pytest.approx(straight[entry].losses, rel=1e-4)
    assert moved[entry].metrics == pytest.approx(straight[entry].metrics, rel=1e-3, abs=1e-5)
