from pathlib import Path

from finetune.checkpoint.format.manifest import RunFingerprint
from finetune.checkpoint.read.changes import check_changes
from finetune.errors import CheckpointError
from tests.checkpoint.small_run import Run
from tests.refusals import refused

PATH = Path("/runs/first/checkpoints/step-000004")
MATHS = {"train.learning_rate": "0.01", "train.steps": "8", "training data": "abc", "model.lora": "null"}
SETTINGS = {"report.log_every_steps": "10", "data.max_length": "64"}


def facts(*, settings=(), **maths):
    return RunFingerprint(
        {**MATHS, **{name: str(value) for name, value in maths.items()}}, {**SETTINGS, **dict(settings)}, {}
    )


def tell(here, allowed=()):
    return check_changes(PATH, facts(), current=here, allowed=allowed)


def refusal(here, *said, allowed=()):
    with refused(CheckpointError, *said) as caught:
        tell(here, allowed)
    return str(caught.value)


def test_an_unchanged_run_reports_no_changes():
    assert tell(facts()) == []


def test_a_changed_setting_that_may_change_is_logged():
    assert tell(facts(settings={"report.log_every_steps": "5"})) == [
        "changed since the checkpoint: report.log_every_steps 10 -> 5"
    ]


def test_a_change_of_the_math_is_rejected_with_the_setting_that_allows_it():
    refusal(facts(**{"train.learning_rate": 0.02}), PATH, "0.01", "0.02", "allow_changes: [train.learning_rate]")


def test_the_suggested_allow_changes_keeps_keys_that_are_already_allowed():
    said = refusal(facts(**{"train.learning_rate": 0.02, "train.steps": 9}), allowed=["train.steps"])
    assert "train.steps: " not in said
    assert said.endswith("checkpoint.allow_changes: [train.steps, train.learning_rate]")


def test_allowed_changes_are_logged_and_allowed_keys_without_a_change_are_reported():
    assert tell(facts(**{"train.learning_rate": 0.02}), allowed=["train.learning_rate", "train.steps"]) == [
        "changed since the checkpoint, allowed by checkpoint.allow_changes: train.learning_rate 0.01 -> 0.02",
        "checkpoint.allow_changes: has no effect, unchanged since the checkpoint: train.steps",
    ]


def test_changed_training_rows_are_rejected_even_if_allowed_and_the_responsible_setting_is_named():
    changed = facts(settings={"data.max_length": "128"}, **{"training data": "xyz"})
    assert "allow_changes" not in refusal(changed, "xyz", "data.max_length: 64", "128", allowed=["training data"])


def test_rows_of_another_version_of_the_cache_are_compared_by_their_samples():
    """The digest of version 0.2 has no version. `restore` compares the samples."""
    assert tell(facts(**{"training data": "xyz-6"})) == [
        "training data: compared by the samples so far: the checkpoint is of another version of the cache"
    ]
    refusal(facts(settings={"data.max_length": "128"}, **{"training data": "xyz-6"}), "training data: abc", "xyz-6")


def test_a_section_that_came_is_one_line():
    assert "model.lora.rank" not in refusal(
        facts(**{"model.lora": "written", "model.lora.rank": 8}), "model.lora: null"
    )


def test_resuming_rejects_changes_before_loading_and_logs_allowed_ones(folder):
    Run(folder, identity={"train.steps": "8"}).train(range(1))
    with refused(CheckpointError, "allow_changes", "train.steps"):
        Run(folder, identity={"train.steps": "9"}).resume()
    run = Run(folder, identity={"train.steps": "9"}, allow_changes=("train.steps",))
    assert run.resume()["step"] == 1
    assert run.said == ["changed since the checkpoint, allowed by checkpoint.allow_changes: train.steps 8 -> 9"]


def test_a_url_recorded_with_its_signature_by_an_older_version_is_not_a_change():
    signed = facts(settings={"data.train.path": '"https://h/x.jsonl?sig=c0ffee"'})
    here = facts(settings={"data.train.path": '"https://h/x.jsonl"'})
    assert check_changes(PATH, signed, current=here, allowed=()) == []
