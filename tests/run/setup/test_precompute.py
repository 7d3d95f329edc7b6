"""What is known of samples beforehand is worked out once, by the model as it starts, whatever a run goes on from."""

import random
import shutil
from pathlib import Path

import pytest

from finetune.config.load import load_config
from finetune.errors import ConfigError, DataError
from finetune.report.history import read_events
from finetune.run.setup.precompute import _write_on_rank_0
from tests.refusals import refused
from tests.scenarios.trained import train_here
from tests.small_job import WORDS, write_job, write_rows

PREFERENCES = [
    "data.train={path: train.jsonl, format: preference}",
    "data.validation={path: held_out.jsonl, format: preference}",
    "task={name: preference, preference: {beta: 0.5}}",
    "train.global_batch_size=4",
    "train.microbatch_size=2",
    "train.steps=4",
    "evaluate={}",
    "checkpoint.every_steps=2",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("priors")
    job = write_job(folder)
    chance = random.Random(1)
    for name, count in (("train.jsonl", 9), ("held_out.jsonl", 3), ("more.jsonl", 5)):
        rows = [
            {
                "prompt": " ".join(chance.choices(WORDS, k=3)),
                "chosen": " ".join(chance.choices(WORDS, k=chance.randint(1, 5))),
                "rejected": f"no {chance.choice(WORDS)}",
            }
            for _ in range(count)
        ]
        write_rows(folder / name, rows)
    return job


@pytest.fixture
def run(job, capsys):
    """Train with overrides; return the losses of all steps and what was said."""

    def start(name: str, *overrides: str) -> tuple[list[float], str]:
        folder = job.parent / "runs" / name
        train_here(job, f"run.folder={folder}", *PREFERENCES, *overrides)
        losses = [each["loss"] for each in read_events(folder / "events.jsonl") if each["event"] == "StepTaken"]
        return losses, capsys.readouterr().out

    return start


def known(job: Path) -> set[str]:
    folder = job.parent / "cache" / "known"
    return {path.name for path in folder.glob("[!.]*")}


def test_reference_log_probabilities_are_computed_once_and_reused_with_new_adapters(job, run):
    losses, said = run("first")
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)  # the model is its own reference yet
    assert said.count("reference log-probabilities computed in") == 2  # training and validation
    folders = known(job)
    assert len(folders) == 2
    _, said = run("second", "model.lora={rank: 2, alpha: 4.0, dropout: 0.2}", "train.learning_rate=1e-3")
    assert said.count("reference log-probabilities found") == 2
    assert known(job) == folders


def test_a_resume_without_the_cache_recomputes_the_reference_from_the_initial_model(job, run):
    whole, _ = run("whole")
    run("resumed", "train.stop_after_steps=2")
    shutil.rmtree(job.parent / "cache" / "known")
    losses, said = run("resumed")
    assert "resumes from" in said
    assert "computed in" in said
    assert losses == whole


def test_damaged_precomputed_arrays_are_computed_again(job, run):
    whole, _ = run("undamaged")
    for name in known(job):
        file = next((job.parent / "cache" / "known" / name).glob("chunk-*.bin"))
        content = bytearray(file.read_bytes())
        content[0] ^= 64
        file.write_bytes(content)
    losses, said = run("damaged")
    assert said.count("has changed between bytes") == 2
    assert said.count("is computed again") == 2
    assert losses == whole


def test_another_seed_is_another_reference(job, run):
    run("one")
    before = known(job)
    run("other", "run.seed=8")
    assert len(known(job) - before) == 2


def test_each_source_of_a_mix_has_its_own(job, run):
    mix = "data.train={mix: [{path: train.jsonl, format: preference}, {path: more.jsonl, format: preference}]}"
    counted = mix.replace("preference}", "preference, epochs: 1}")
    losses, said = run("mix", counted)
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)
    assert "data.train.mix.1: reference log-probabilities computed in" in said


def test_a_loss_without_a_reference_precomputes_nothing(job, run):
    _, said = run("simpo", "task.preference.loss=simpo")
    assert "reference log-probabilities" not in said


def test_streams_are_refused_before_anything_is_built(job):
    with refused(ConfigError, "data.train.stream"):
        load_config(job, [*PREFERENCES, "data.train={path: train.jsonl, format: preference, stream: {}}"])


def test_an_unwritable_precompute_cache_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        refused(DataError, "data.cache_folder: "),
        _write_on_rank_0(tmp_path / "file" / "known" / "key", {}),
    ):
        pass
