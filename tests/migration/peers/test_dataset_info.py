"""Datasets of LLaMA-Factory's dataset_info.json: each key is mapped or named, and rows are read likewise."""

import json
from typing import Any

import pytest

from finetune.config.sections.data import TrainingSourceSection
from finetune.data.sources.source import open_source
from finetune.errors import ConfigError, UserError
from finetune.migration.migrate import source_of_key
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
ALPACA = {"file_name": "rows.json"}
SHAREGPT = {"file_name": "rows.json", "formatting": "sharegpt"}
ROLES = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
WHO = {
    **{"role_tag": "who", "content_tag": "what", "user_tag": "customer", "assistant_tag": "agent"},
    **{"observation_tag": "result", "function_tag": "call", "system_tag": "rules"},
}


@pytest.fixture
def convert(migrate, tmp_path):
    """Return a function from an entry, and perhaps the row that it describes, to what is made of a config with it."""

    def convert_entry(entry: Any, row: Any = None, *, stage: str = "sft", more: str = ""):
        (tmp_path / "rows.json").write_text(json.dumps([row or {"x": 1}]))
        (tmp_path / "dataset_info.json").write_text(json.dumps({"other": {"file_name": 3}, "mine": entry}, indent=1))
        return migrate(CONFIG.format(stage=stage, names="mine") + more)

    return convert_entry


def read(migration) -> Any:
    """Return the first row as the job's source reads it."""
    source = open_source(TrainingSourceSection(**job_of(migration)["data"]["train"]), key="data.train", log=print)
    return source.format.read(next(iter(source.rows())))


def is_lost(migration) -> bool:
    return bool(migration.draft.keys_of("not_possible") or migration.draft.keys_of("unknown"))


TALK = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
OWN_TALK = [{"who": "customer", "what": "one"}, {"who": "agent", "what": "two"}]
OPENAI_TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
ASKED = {"prompt": "my q", "query": "in", "response": "a", "history": "before"}
JUDGED = {**SHAREGPT, "columns": {"messages": "talk", "kto_tag": "ok", "system": "rules"}}
JUDGED_TEXT = {**ALPACA, "columns": {"prompt": "q", "response": "a", "kto_tag": "ok"}}
PAIRED = {**SHAREGPT, "ranking": True, "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}}
PAIRED_TEXT = {
    **ALPACA,
    "ranking": True,
    "columns": {"prompt": "q", "query": "in", "chosen": "good", "rejected": "bad"},
}
PAIRED_LATER = {**PAIRED_TEXT, "columns": {"prompt": "q", "history": "before", "chosen": "good", "rejected": "bad"}}


@pytest.mark.parametrize(
    ("entry", "stage", "row", "expected"),
    [
        (ALPACA, "sft", {"instruction": "add", "input": "2+2", "output": "4"}, ["add\n2+2", "4"]),
        (ALPACA, "sft", {"instruction": "add", "output": "4"}, ["add", "4"]),
        (  # columns that are not named are not read once some are
            {**ALPACA, "columns": {"prompt": "my q", "response": "a"}},
            "sft",
            {"my q": "add", "input": "2+2", "a": "4"},
            ["add", "4"],
        ),
        (
            {**ALPACA, "columns": ASKED},
            "sft",
            {"my q": 'say "b"', "in": "é", "a": "b\n", "before": [["one", "a"]]},
            ["one", "a", 'say "b"\né', "b\n"],
        ),
        ({**ALPACA, "columns": ASKED}, "sft", {"my q": "q", "in": "", "a": "a", "before": None}, ["q", "a"]),
        ({**SHAREGPT, "columns": {"messages": "talk"}, "tags": WHO}, "sft", {"talk": OWN_TALK}, ["one", "two"]),
        ({**SHAREGPT, "formatting": "openai", "tags": ROLES}, "sft", {"conversations": OPENAI_TALK}, ["one", "two"]),
        (PAIRED_TEXT, "dpo", {"q": "add", "in": "2+2", "good": "4", "bad": "5"}, ["add\n2+2", "4", "5"]),
        (
            PAIRED_LATER,
            "dpo",
            {"q": "three", "before": [["one", "two"]], "good": "4", "bad": "5"},
            ["one", "two", "three", "4", "5"],
        ),
        (PAIRED, "dpo", {"talk": TALK[:1], "good": TALK[1], "bad": TALK[1]}, ["one", "two", "two"]),
        (
            {**PAIRED, "tags": WHO},
            "rm",
            {"talk": OWN_TALK[:1], "good": OWN_TALK[1], "bad": {"who": "agent", "what": "no"}},
            ["one", "two", "no"],
        ),
        (JUDGED_TEXT, "kto", {"q": "?", "a": "!", "ok": True}, ["?", "!", True]),
        (JUDGED, "kto", {"talk": [*TALK, *TALK], "ok": 1, "rules": "be"}, ["be", "one", "two", "one", "two", True]),
        ({**JUDGED, "tags": WHO}, "kto", {"talk": OWN_TALK, "ok": False, "rules": None}, ["one", "two", False]),
    ],
)
def test_rows_are_read_as_there(convert, entry, stage, row, expected):
    migration = convert(entry, row, stage=stage)
    found = read(migration)
    turns = [
        turn for name in ("messages", "prompt", "chosen", "rejected", "completion") for turn in found.get(name, ())
    ]
    assert [*(turn["content"] for turn in turns), *([found["is_good"]] if stage == "kto" else [])] == expected
    answers = [turn for name in ("chosen", "rejected", "completion") for turn in found.get(name, ())] or turns[-1:]
    assert {turn["role"] for turn in answers} == {"assistant"} and not is_lost(migration)
    keys = [key for key in migration.draft.outcomes if ".columns." in key or ".tags." in key]
    assert {fate_of(migration, key)[0] for key in keys} <= {"mapped"}


def test_calls_and_results_in_words_of_their_own_are_calls_and_results(convert):
    turns = [
        {"who": "rules", "what": "be kind"},
        {"who": "customer", "what": "2+2?"},
        {"who": "call", "what": '{"name": "add", "arguments": {"x": 2}}'},
        {"who": "result", "what": "4"},
        {"who": "agent", "what": "four"},
    ]
    row = read(convert({**SHAREGPT, "tags": WHO}, {"conversations": turns}))["messages"]
    assert [turn["role"] for turn in row] == ["system", "user", "assistant", "tool", "assistant"]
    assert row[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": 2}}


@pytest.mark.parametrize(
    ("entry", "stage", "key", "words"),
    [
        ({**ALPACA, "ranking": True}, "sft", "ranking", "ranking"),
        (ALPACA, "dpo", "file_name", "with `ranking`"),
        ({**ALPACA, "columns": {"prompt": "q"}}, "sft", "file_name", "`completion`"),
        (ALPACA, "kto", "file_name", "`label`"),
        ({**ALPACA, "columns": {"kto_tag": "ok"}}, "sft", "columns.kto_tag", "stage: kto"),
        ({**SHAREGPT, "columns": {"messages": "m", "videos": "v"}}, "sft", "columns.videos", "not read here"),
        ({**PAIRED, "columns": {**PAIRED["columns"], "images": "i"}}, "dpo", "columns.images", "no `images`"),
        ({**ALPACA, "formatting": "alpacca"}, "sft", "formatting", "refuses it, too"),
        (SHAREGPT, "pt", "formatting", "first question"),
        ({**ALPACA, "columns": {"prompt": "q", "history": "h"}}, "pt", "columns.history", "first question"),
        ({**ALPACA, "split": "test"}, "sft", "split", "no splits"),
        ({"hf_hub_url": "org/rows", "folder": "en"}, "sft", "folder", "hf://datasets/org/rows"),
        ({"ms_hub_url": "org/rows"}, "sft", "ms_hub_url", "download"),
        ({"script_url": "script"}, "sft", "script_url", "download"),
        ({**ALPACA, "num_samples": "many"}, "sft", "num_samples", "not a whole number"),
        ({**ALPACA, "columns": {"prompt": ["q"]}}, "sft", "columns.prompt", "not a text"),
    ],
)
def test_a_key_that_cannot_be_read_is_named(convert, entry, stage, key, words):
    fate, text = fate_of(convert(entry, stage=stage), f"dataset_info.json:mine.{key}")
    assert fate == "not_possible" and words in text


def test_keys_without_effect_and_unknown_keys_are_named_with_their_line(convert, tmp_path):
    entry = {**ALPACA, "columns": {"prompt": "q", "response": "a", "query": "", "mesages": "m"}}
    migration = convert({**entry, "subset": "en", "tags": {"role_tag": "role"}, "weight": 2})
    for fate, keys in {
        "unknown": ("columns.mesages", "weight"),
        "not_needed": ("columns.query", "subset", "tags.role_tag"),
    }.items():
        assert {fate_of(migration, f"dataset_info.json:mine.{key}")[0] for key in keys} == {fate}
    lines = (tmp_path / "dataset_info.json").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if "subset" in line)
    assert source_of_key(migration.draft, "dataset_info.json:mine.subset").startswith(f"line {number}: dataset_info")


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            {"hf_hub_url": "org/rows", "subset": "en", "split": "train[:50%]", "num_samples": 30, "ms_hub_url": "x/y"},
            {"name": "org/rows", "config": "en", "split": "train[:50%]", "take": 20},
        ),
        ({**ALPACA, "split": "train[:40]"}, {"take": 20}),
        ({**ALPACA, "num_samples": 5}, {"take": 5}),
        (SHAREGPT, {"format": "conversations"}),
        ({**SHAREGPT, "tags": ROLES}, {"format": "messages", "columns": {"messages": "conversations"}}),
    ],
)
def test_a_dataset_keeps_subset_split_number_and_turns_in_usual_words(convert, entry, expected):
    migration = convert(entry, more="max_samples: 20\n")
    assert expected.items() <= job_of(migration)["data"]["train"].items() and not is_lost(migration)


def test_images_make_it_a_vision_job_whose_files_are_in_the_folder_of_the_datasets(convert, tmp_path):
    job = job_of(convert({**SHAREGPT, "columns": {"messages": "talk", "images": "pictures"}}))
    assert job["task"]["name"] == "vision_language_sft"
    assert job["data"]["train"]["columns"] == {"conversations": "talk", "images": "pictures"}
    assert job["data"]["train"]["image_root"] == str(tmp_path)
    assert job_of(convert({**SHAREGPT, "columns": {"messages": "talk", "images": ""}}))["task"]["name"] == "sft"


def test_a_dataset_without_an_entry_or_a_broken_file_is_one_message(convert, migrate, tmp_path):
    with pytest.raises(UserError, match=r"dataset_info\.json: there is no dataset `mine`"):
        convert({})
    with pytest.raises(UserError, match="without `file_name` or `hf_hub_url` has no rows"):
        convert({"formatting": "sharegpt"})
    with pytest.raises(UserError, match="Did you mean `mine`"):
        convert(ALPACA, more="eval_dataset: min\n")
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "a.json",\n "file_name": "b.json"}}')
    with pytest.raises(ConfigError, match="line 2"):
        migrate(CONFIG.format(stage="sft", names="mine"))


def test_datasets_named_alike_do_not_share_keys_and_one_may_be_validated_on(migrate, tmp_path):
    info = {"v1": ALPACA, "v1.5": {**ALPACA, "num_samples": 5}}
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    migration = migrate(CONFIG.format(stage="sft", names="v1,v1.5") + "eval_dataset: v1\n")
    first, second = job_of(migration)["data"]["train"]["mix"]
    assert "take" not in first and second["take"] == 5
    assert {key for key in migration.draft.outcomes if "num_samples" in key} == {"dataset_info.json:v1.5.num_samples"}
    assert job_of(migration)["data"]["validation"]["path"] == str(tmp_path / "rows.json")
