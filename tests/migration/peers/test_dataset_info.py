"""Datasets of LLaMA-Factory's dataset_info.json: each key is mapped or named, and rows are read likewise."""

import json
from typing import Any

import pytest

from finetune.config.sections.data import TrainingSourceSection
from finetune.data.sources.source import open_source
from finetune.errors import ConfigError, UserError
from finetune.migration.migrate import source_of_key
from finetune.registry.formats import FORMATS
from tests.migration.conftest import fate_of, job_of

CONFIG = """
model_name_or_path: org/base-1b
stage: {stage}
finetuning_type: full
dataset: {names}
dataset_dir: .
cutoff_len: 128
output_dir: out
per_device_train_batch_size: 1
learning_rate: 1e-5
"""
SHAREGPT = {"file_name": "rows.json", "formatting": "sharegpt"}


@pytest.fixture
def convert(migrate, tmp_path):
    """Return a function from an entry, and perhaps the rows that it describes, to what is made of a config with it."""

    def convert_entry(entry: Any, rows: Any = (), *, stage: str = "sft", more: str = ""):
        (tmp_path / "rows.json").write_text(json.dumps(list(rows) or [{"x": 1}]))
        (tmp_path / "dataset_info.json").write_text(json.dumps({"other": {"file_name": 3}, "mine": entry}, indent=1))
        return migrate(CONFIG.format(stage=stage, names="mine") + more)

    return convert_entry


def read(migration) -> Any:
    """Return the first row as the job's source reads it."""
    source = open_source(TrainingSourceSection(**job_of(migration)["data"]["train"]), key="data.train", log=print)
    return source.format.read(next(iter(source.rows())))


def spoken(turns) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in turns]


def is_lost(migration) -> bool:
    return bool(migration.draft.keys_of("not_possible") or migration.draft.keys_of("unknown"))


def test_question_and_input_are_joined_by_one_line_end(convert):
    migration = convert({"file_name": "rows.json"}, [{"instruction": "add", "input": "2+2", "output": "4"}])
    assert spoken(read(migration)["messages"]) == [("user", "add\n2+2"), ("assistant", "4")]
    migration = convert({"file_name": "rows.json"}, [{"instruction": "add", "output": "4"}])
    assert spoken(read(migration)["messages"]) == [("user", "add"), ("assistant", "4")]
    assert not is_lost(migration)


def test_columns_that_are_not_named_are_not_read_once_some_are(convert):
    entry = {"file_name": "rows.json", "columns": {"prompt": "my question", "response": "a"}}
    migration = convert(entry, [{"my question": "add", "input": "2+2", "a": "4"}])
    assert spoken(read(migration)["messages"]) == [("user", "add"), ("assistant", "4")]


@pytest.mark.parametrize(
    ("tags", "form"),
    [
        (None, "conversations"),
        ({"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}, "messages"),
    ],
)
def test_turns_in_usual_words_are_read_as_they_are(convert, tags, form):
    train = job_of(convert({**SHAREGPT, **({"tags": tags} if tags else {})}))["data"]["train"]
    assert train["format"] == form and "template" not in train


def test_openai_turns_are_messages(convert):
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    entry = {**SHAREGPT, "formatting": "openai", "columns": {"messages": "messages"}, "tags": tags}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    migration = convert(entry, [{"messages": turns}])
    assert spoken(read(migration)["messages"]) == [("user", "hi"), ("assistant", "hello")]


def test_pairs_of_texts(convert):
    columns = {"prompt": "instruction", "query": "input", "chosen": "good", "rejected": "bad"}
    row = {"instruction": "add", "input": "2+2", "good": "4", "bad": "5"}
    migration = convert({"file_name": "rows.json", "ranking": True, "columns": columns}, [row], stage="dpo")
    pair = read(migration)
    assert [spoken(pair[name]) for name in ("prompt", "chosen", "rejected")] == [
        [("user", "add\n2+2")],
        [("assistant", "4")],
        [("assistant", "5")],
    ]
    assert not is_lost(migration)


def test_pairs_of_conversations_name_their_columns(convert):
    columns = {"messages": "talk", "chosen": "good", "rejected": "bad"}
    train = job_of(convert({**SHAREGPT, "ranking": True, "columns": columns}, stage="dpo"))["data"]["train"]
    assert train["format"] == "preference"
    assert train["columns"] == {"prompt": "talk", "chosen": "good", "rejected": "bad"}


def test_judged_answers_are_the_last_turns(convert):
    entry = {**SHAREGPT, "columns": {"messages": "talk", "kto_tag": "ok"}}
    train = job_of(convert(entry, stage="kto", more="pref_ftx: 0.5\n"))["data"]["train"]
    assert train["format"] == "judged" and train["columns"] == {"label": "ok"}
    assert train["template"] == {"prompt": "{{ talk[:-1] | tojson }}", "completion": "{{ talk[-1:] | tojson }}"}
    assert fate_of(convert(entry, stage="kto", more="pref_ftx: 0.5\n"), "pref_ftx")[0] == "not_possible"
    columns = {"prompt": "q", "response": "a", "kto_tag": "ok"}
    migration = convert({"file_name": "rows.json", "columns": columns}, [{"q": "?", "a": "!", "ok": True}], stage="kto")
    assert read(migration)["is_good"] is True


TALK = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
JUDGED = {**SHAREGPT, "columns": {"messages": "talk", "kto_tag": "ok", "system": "rules"}}
PAIRED = {**SHAREGPT, "ranking": True, "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}}


@pytest.mark.skipif("system" not in FORMATS["judged"].optional, reason="templates of prompts are not read as turns yet")
@pytest.mark.parametrize(
    ("entry", "stage", "row", "prompt", "answers"),
    [
        (JUDGED, "kto", {"talk": TALK, "ok": False, "rules": ""}, ["one"], {"completion": "two"}),
        (
            JUDGED,
            "kto",
            {"talk": [*TALK, *TALK], "ok": 1, "rules": "be"},
            ["be", "one", "two", "one"],
            {"completion": "two"},
        ),
        (
            PAIRED,
            "dpo",
            {"talk": TALK[:1], "good": TALK[1], "bad": TALK[1]},
            ["one"],
            {"chosen": "two", "rejected": "two"},
        ),
    ],
)
def test_pairs_and_judged_answers_are_read_with_the_turns_before_them(convert, entry, stage, row, prompt, answers):
    migration = convert(entry, [row], stage=stage)
    found = read(migration)
    assert [turn["content"] for turn in found["prompt"]] == prompt and not is_lost(migration)
    assert {name: [("assistant", answer)] for name, answer in answers.items()} == {
        name: spoken(found[name]) for name in answers
    }


@pytest.mark.parametrize(
    ("entry", "stage", "key", "words"),
    [
        ({"file_name": "rows.json", "ranking": True}, "sft", "ranking", "ranking"),
        ({"file_name": "rows.json"}, "dpo", "file_name", "with `ranking`"),
        ({"file_name": "rows.json", "columns": {"prompt": "q"}}, "sft", "file_name", "`completion`"),
        ({"file_name": "rows.json"}, "kto", "file_name", "`label`"),
        ({"file_name": "rows.json", "columns": {"prompt": "q", "history": "h"}}, "sft", "columns.history", "template"),
        ({**SHAREGPT, "tags": {"role_tag": "who"}}, "sft", "tags.role_tag", "usual words"),
        ({**SHAREGPT, "columns": {"messages": "m", "videos": "v"}}, "sft", "columns.videos", "not read here"),
        ({"file_name": "rows.json", "formatting": "alpacca"}, "sft", "formatting", "refuses it, too"),
        ({"file_name": "rows.json", "formatting": "sharegpt"}, "pt", "formatting", "reads the first turn"),
        ({"file_name": "rows.json", "split": "test"}, "sft", "split", "no splits"),
        ({"hf_hub_url": "org/rows", "folder": "en"}, "sft", "folder", "hf://datasets/"),
        ({"hf_hub_url": "org/rows", "script_url": "script"}, "sft", "script_url", "download"),
        ({"file_name": "rows.json", "num_samples": "many"}, "sft", "num_samples", "whole number"),
        ({"file_name": "rows.json", "columns": {"prompt": ["q"]}}, "sft", "columns.prompt", "not a text"),
    ],
)
def test_a_key_that_cannot_be_read_is_named(convert, entry, stage, key, words):
    fate, text = fate_of(convert(entry, stage=stage), f"dataset_info.json:mine.{key}")
    assert fate == "not_possible" and words in text


def test_keys_without_effect_and_unknown_keys_are_named_with_their_line(convert, tmp_path):
    entry = {"file_name": "rows.json", "columns": {"prompt": "q", "response": "a", "query": "", "mesages": "m"}}
    migration = convert({**entry, "subset": "en", "tags": {"role_tag": "role"}, "weight": 2})
    assert fate_of(migration, "dataset_info.json:mine.columns.mesages")[0] == "unknown"
    assert fate_of(migration, "dataset_info.json:mine.weight")[0] == "unknown"
    for key in ("columns.query", "subset", "tags.role_tag"):
        assert fate_of(migration, f"dataset_info.json:mine.{key}")[0] == "not_needed"
    lines = (tmp_path / "dataset_info.json").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if "subset" in line)
    assert source_of_key(migration.draft, "dataset_info.json:mine.subset").startswith(f"line {number}: dataset_info")


def test_rows_of_the_hub_keep_subset_and_number(convert):
    entry = {"hf_hub_url": "org/rows", "subset": "en", "split": "train[:50%]", "num_samples": 30, "ms_hub_url": "x/y"}
    migration = convert(entry, more="max_samples: 20\n")
    train = job_of(migration)["data"]["train"]
    assert fate_of(migration, "dataset_info.json:mine.ms_hub_url")[0] == "not_needed" and not is_lost(migration)
    assert (train["name"], train["config"], train["split"], train["take"]) == ("org/rows", "en", "train[:50%]", 20)


def test_images_make_it_a_vision_job_whose_files_are_in_the_folder_of_the_datasets(convert, tmp_path):
    job = job_of(convert({**SHAREGPT, "columns": {"messages": "talk", "images": "pictures"}}))
    assert job["task"]["name"] == "vision_language_sft"
    assert job["data"]["train"]["columns"] == {"conversations": "talk", "images": "pictures"}
    assert job["data"]["train"]["image_root"] == str(tmp_path)
    assert job_of(convert({**SHAREGPT, "columns": {"messages": "talk", "images": ""}}))["task"]["name"] == "sft"


def test_a_dataset_without_an_entry_is_refused_with_a_suggestion(convert):
    with pytest.raises(UserError, match=r"dataset_info\.json: there is no dataset `mine`"):
        convert({})
    with pytest.raises(UserError, match="Did you mean `mine`"):
        convert({"file_name": "rows.json"}, more="eval_dataset: min\n")


def test_a_broken_file_is_one_message_with_its_line(migrate, tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "a.json",\n "file_name": "b.json"}}')
    with pytest.raises(ConfigError, match="line 2"):
        migrate(CONFIG.format(stage="sft", names="mine"))


def test_two_validation_sets_are_not_one(convert, tmp_path):
    migration = convert({"file_name": "rows.json"}, more="eval_dataset: mine\n")
    assert job_of(migration)["data"]["validation"]["path"] == str(tmp_path / "rows.json")
    assert fate_of(migration, "eval_dataset")[0] == "mapped"


def test_datasets_named_alike_do_not_share_keys(migrate, tmp_path):
    info = {"v1": {"file_name": "rows.json"}, "v1.5": {"file_name": "rows.json", "num_samples": 5}}
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    migration = migrate(CONFIG.format(stage="sft", names="v1,v1.5"))
    first, second = job_of(migration)["data"]["train"]["mix"]
    assert "take" not in first and second["take"] == 5
    assert {key for key in migration.draft.outcomes if "num_samples" in key} == {"dataset_info.json:v1.5.num_samples"}


@pytest.mark.parametrize("strategy", ["concat", "interleave_under"])
def test_all_rows_of_several_datasets_are_mixed(migrate, tmp_path, strategy):
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps({name: {"file_name": "rows.json"} for name in "ab"}))
    migration = migrate(f"{CONFIG.format(stage='sft', names='a, b')}mix_strategy: {strategy}\n")
    assert [source["epochs"] for source in job_of(migration)["data"]["train"]["mix"]] == [1, 1]
    assert fate_of(migration, "mix_strategy")[0] == ("not_needed" if strategy == "concat" else "not_possible")
