"""A job names the version of its keys; a renamed key works for two minor versions, with a warning."""

import warnings

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.load import load_config, load_resolved
from finetune.config.rules import versions
from finetune.config.rules.versions import RenamedKey
from finetune.config.schema import all_keys
from finetune.config.section import has_key
from finetune.errors import ConfigError, RenamedKeyWarning
from tests.refusals import refused
from tests.small_job import JOB, write_job

OLD_STEPS = RenamedKey("train.num_steps", "train.steps", since="0.3")
OLD_LENGTH = RenamedKey("task.longest", "data.max_length", since="0.3")
OLD_SECTION = RenamedKey("saving", "checkpoint", since="0.3")


@pytest.fixture
def renamed(monkeypatch):
    """Three planted entries: within a section, from one section to another, and a section with its keys."""
    monkeypatch.setattr(versions, "RENAMED_KEYS", (OLD_STEPS, OLD_LENGTH, OLD_SECTION))


OLD_JOB = (
    JOB.replace("  steps: 8", "  num_steps: 8")
    .replace("  max_length: 128\n", "")
    .replace("task: {name: sft}", "task: {name: sft, longest: 128}")
    .replace("checkpoint: {", "saving: {")
)


def test_every_entry_of_the_table_names_an_existing_key_and_no_old_one():
    keys = {key for key, _ in all_keys()}
    for entry in versions.RENAMED_KEYS:
        assert entry.new in keys and entry.old not in keys


def test_an_old_name_works_for_two_minor_versions():
    assert OLD_STEPS.until == "0.5"


def test_an_old_job_is_read_as_the_new_one_with_a_warning_for_each_key(tmp_path, renamed):
    new = load_config(write_job(tmp_path))
    old = write_job(tmp_path, text=OLD_JOB)
    with pytest.warns(RenamedKeyWarning) as caught:
        loaded = load_config(old)
    assert loaded.config == new.config
    facts = [(each.message.old, each.message.new, each.message.since, each.message.until) for each in caught]
    assert facts == [(key.old, key.new, "0.3", "0.5") for key in (OLD_STEPS, OLD_LENGTH, OLD_SECTION)]
    line = OLD_JOB.splitlines().index("  num_steps: 8") + 1
    assert caught[0].message.where == f"job.yaml line {line}"
    assert str(loaded.sources["train.steps"]) == f"job.yaml line {line}"
    assert str(loaded.sources["checkpoint.every_steps"]).startswith("job.yaml line ")


def test_an_override_may_use_the_old_name(tmp_path, renamed):
    with pytest.warns(RenamedKeyWarning) as caught:
        loaded = load_config(write_job(tmp_path), ["train.num_steps=4", "saving.keep_last=3"])
    assert (loaded.config.train.steps, loaded.config.checkpoint.keep_last) == (4, 3)
    assert [each.message.where for each in caught] == ["--set train.num_steps", "--set saving"]


def test_a_key_under_both_names_is_refused_with_its_line(tmp_path, renamed):
    path = write_job(tmp_path, text=JOB.replace("  steps: 8", "  steps: 8\n  num_steps: 9"))
    with refused(ConfigError, "train.num_steps", "`train.steps`"):
        load_config(path)


def test_the_config_of_an_old_run_is_read_without_warnings(tmp_path, monkeypatch):
    text = resolved_yaml(load_config(write_job(tmp_path)))
    (tmp_path / "resolved.yaml").write_text(text.replace("  steps: 8 ", "  num_steps: 8 "))
    monkeypatch.setattr(versions, "RENAMED_KEYS", (OLD_STEPS,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_resolved(tmp_path).config.train.steps == 8


def test_version_1_may_be_written(tmp_path):
    plain = load_config(write_job(tmp_path)).config
    assert load_config(write_job(tmp_path, text=f"version: 1\n{JOB}")).config == plain
    assert has_key(plain, "version") and resolved_yaml(load_config(tmp_path / "job.yaml")).splitlines()[1].startswith(
        "version: 1 "
    )


@pytest.mark.parametrize("written", ["2", "0", "'1'", "true"])
def test_another_version_is_refused_with_what_to_do(tmp_path, written):
    path = write_job(tmp_path, text=f"version: {written}\n{JOB}")
    with refused(ConfigError) as error:
        load_config(path)
    assert "line 1, version: " in str(error.value) and len(str(error.value).splitlines()) == 2
