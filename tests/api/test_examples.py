"""The examples of docs/how-to/session.md learn what they are about, on the quickstart's model."""

import re
import sys
from pathlib import Path

import pytest

from finetune.recipes.quickstart import quickstart_files
from tests import launching

EXAMPLES = launching.ROOT / "docs" / "examples"
TIMEOUT_SECONDS = 900.0

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the job of the quickstart and its checkpoint after 140 steps, when a third of the answers are right."""
    folder = tmp_path_factory.mktemp("quickstart")
    for name, text in quickstart_files().items():
        (folder / name).write_text(text)
    job = folder / "job.yaml"
    recipe = (launching.ROOT / "finetune/recipes/quickstart.yaml").read_text()
    job.write_text(recipe)
    command = [sys.executable, "-m", "finetune", "train", "--config", str(job), "--set", "train.stop_after_steps=140"]
    assert launching.run(command, log=folder / "log", timeout_seconds=TIMEOUT_SECONDS) == 0, (
        folder / "log"
    ).read_text()
    return job, folder / "runs/quickstart/checkpoints/step-000140"


def run_example(name: str, quickstart: tuple[Path, Path], *, steps: int) -> dict[str, float]:
    """Return the figures that the example prints, by their titles."""
    job, checkpoint = quickstart
    command = [sys.executable, str(EXAMPLES / name), str(job), str(checkpoint), "--steps", str(steps)]
    log, environment = job.parent / f"{name}.log", {"PYTHONPATH": str(launching.ROOT)}
    assert launching.run(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment=environment) == 0, (
        log.read_text()
    )
    return {
        title: float(number) for title, number in re.findall(r"^(.*): (-?\d+\.\d+)$", log.read_text(), re.MULTILINE)
    }


def test_group_relative_policy_optimization_raises_the_mean_reward(quickstart):
    figures = run_example("grpo.py", quickstart, steps=25)
    assert figures["mean reward after"] > figures["mean reward before"] + 0.02


def test_best_of_n_distillation_raises_the_score_of_the_most_probable_answer(quickstart):
    figures = run_example("best_of_n.py", quickstart, steps=15)
    assert figures["mean score after"] > figures["mean score before"] + 0.02


def test_dpo_raises_the_margin_of_unseen_pairs(quickstart):
    figures = run_example("dpo.py", quickstart, steps=20)
    assert figures["margin before"] == 0.0 and figures["margin after"] > 0.1


def test_examples_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(lengths) == {"dpo.py", "best_of_n.py", "grpo.py"} and max(lengths.values()) < 200
