import pytest

from finetune.config.resume_keys import (
    COMPARED_BY_CONTENT,
    MAY_DIFFER,
    NOT_RECORDED,
    all_keys_to_match,
    keys_that_may_differ,
    keys_that_must_match,
    must_match,
)
from finetune.config.schema import all_keys
from finetune.config.sections.checkpoint import NEVER_ALLOWED

TABLES = (COMPARED_BY_CONTENT, MAY_DIFFER, NOT_RECORDED)


def test_every_key_of_the_tables_exists_once():
    keys = {key for key, _ in all_keys()}
    named = [key for table in TABLES for key in sorted(table)]
    assert len(named) > 50 and set(named) <= keys and len(named) == len(set(named))


def test_a_section_stands_for_its_keys_and_a_key_that_no_table_names_must_match():
    assert "data.train.path" in COMPARED_BY_CONTENT and "data.train.follow_links" in MAY_DIFFER
    assert "data.validation.path" in MAY_DIFFER and "data.validation.fraction" in COMPARED_BY_CONTENT
    assert "checkpoint.every_steps" in MAY_DIFFER and "checkpoint.resume" in NOT_RECORDED
    assert must_match("train.a_new_key") and "plugins" in COMPARED_BY_CONTENT and must_match("plugins.my_loss")
    assert {"train.learning_rate", "model.lora", "data.images.flip"} < set(all_keys_to_match())
    assert "model" not in all_keys_to_match()


def test_keys_that_can_never_change_must_match_or_are_digests():
    assert {name for name in NEVER_ALLOWED if "." in name} <= set(all_keys_to_match())
    digests = {name for name in NEVER_ALLOWED if "." not in name}
    assert digests == {"training data", "tokenizer", "base weights", "first adapter", "tied weights"}


@pytest.fixture
def remembered(load):
    def of(*overrides):
        config = load(*overrides).config
        return keys_that_must_match(config), keys_that_may_differ(config)

    return of


def test_a_value_is_remembered_as_json_under_its_key(remembered):
    maths, settings = remembered("train.optimizer.betas=[0.9, 0.95]")
    assert maths["train.learning_rate"] == "0.0001"
    assert maths["train.optimizer.betas"] == "[0.9, 0.95]"
    assert settings["report.log_every_steps"] == "10"
    assert settings["data.train.path"].endswith('rows.jsonl"')
    assert not maths.keys() & settings.keys()


def test_a_section_that_may_be_left_out_is_there_either_way(remembered):
    assert remembered()[0]["model.lora"] == "null"
    maths, _ = remembered("model.lora.rank=4")
    assert (maths["model.lora"], maths["model.lora.rank"]) == ("written", "4")


def test_run_folder_and_launch_settings_are_not_part_of_the_fingerprint(remembered):
    one = remembered("run.folder=runs/a", "checkpoint.allow_changes=[train.steps]")
    assert one == remembered("run.folder=s3://bucket/runs/b", "run.local_folder=stage")


def test_the_same_value_written_or_by_default_is_the_same(remembered):
    assert remembered() == remembered("train.max_gradient_norm=1.0", "data.shuffle=true", "checkpoint={}")


def test_a_url_with_a_new_signature_is_not_a_change(remembered):
    first, again = (
        remembered(f'data.train.path="https://h/rows.jsonl?X-Amz-Date={n}&X-Amz-Signature=c0ffee{n}"') for n in (1, 2)
    )
    assert first == again
    assert first[1]["data.train.path"] == '"https://h/rows.jsonl"'


def test_no_secret_is_remembered(remembered):
    name = "me/hf_c0ffeeAbcdefghijklmn"
    maths, settings = remembered(f"model.name={name}", f"export.push_to_hub={name}")
    assert maths["model.name"] == settings["export.push_to_hub"] == '"me/[redacted]"'
    values = "{model_type: llama, values: {vocab_size: 9, api_key: c0ffee}}"
    maths, _ = remembered("model.name=null", f"model.from_config={values}", "model.tokenizer.name=gpt2")
    assert maths["model.from_config.values"] == '{"api_key": "[redacted]", "vocab_size": 9}'
