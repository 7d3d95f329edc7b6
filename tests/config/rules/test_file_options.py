"""How files are read is checked with the job: encodings, delimiters, positions, and keys that a kind does not have."""

import pytest

from finetune.config.resume_keys import keys_that_may_differ


@pytest.fixture(autouse=True)
def files(job):
    for name in ("rows.csv", "rows.json", "rows.conll", "rows.csv.gz", "rows.txt"):
        (job.parent / name).write_text("")


def source(**keys):
    written = ", ".join(f"{name}: {value}" for name, value in keys.items())
    return [f"data.train={{{written}}}"]


WRONG = [
    (source(path="rows.csv", encoding="cp1253x"), "data.train.encoding", "`cp1253x` does not exist. Did you mean"),
    (source(path="rows.csv", encoding="base64"), "data.train.encoding", "`base64` does not exist"),
    (source(path="rows.csv", encoding="unicode_escape"), "data.train.encoding", "does not exist"),
    (source(path="rows.csv", delimiter='"\\""'), "data.train.delimiter", "cannot separate columns"),
    (source(path="rows.csv", delimiter='"\\n"'), "data.train.delimiter", "cannot separate columns"),
    (source(path="rows.csv", delimiter='";;"'), "data.train.delimiter", ""),
    (source(path="rows.csv", columns="{0: 1}"), "data.train.columns.0", "a position maps to a name"),
    (source(path="rows.csv", columns="{0: '1'}"), "data.train.columns.0", "a position maps to a name"),
    (source(path="rows.csv", columns="{'01': label}"), "data.train.columns.01", "write the position as `1`"),
    (
        source(path="rows.csv", columns="{0: label, 1: label}"),
        "data.train.columns",
        "two positions have the name `label`",
    ),
    (source(path="rows.csv", columns="{text: -1}"), "data.train.columns.text", ""),
    (source(path="rows.csv", records="data"), "data.train.records", "`.json` files only, not in `.csv` files"),
    (source(path="rows.csv.gz", records="data"), "data.train.records", "`.json` files only, not in `.csv` files"),
    (source(path="rows.jsonl", delimiter='";"'), "data.train.delimiter", "not in `.jsonl` files. Remove it."),
    (source(path="rows.conll", quotes="false"), "data.train.quotes", "not in `.conll` files"),
    (source(path="rows.json", columns="{text: 0}"), "data.train.columns", "columns have positions in"),
    (source(name="me/rows", encoding="cp1252"), "data.train.encoding", "not in a hub dataset"),
    (source(name="me/rows", columns="{text: 0}"), "data.train.columns", "Write their names."),
]


@pytest.mark.parametrize(("overrides", "key", "message"), WRONG)
def test_the_key_is_blamed(problems, overrides, key, message):
    found = problems(*overrides)
    assert [each.key for each in found if each.key == key] == [key], found
    assert any(message in each.message for each in found)


FINE = [
    source(
        path="rows.csv", encoding="ISO-8859-15", delimiter='"\\t"', quotes="false", columns="{prompt: 0, completion: 1}"
    ),
    source(path="rows.csv.gz", encoding="shift_jis", columns="{0: prompt, 1: completion, 2: note}"),
    source(path="rows.json", encoding="utf-16", records="data.items"),
    source(path="'*.csv'", columns="{0: label, 1: name, prompt: name, completion: 0}"),
    source(path=".", delimiter='";"'),  # a folder: its files are looked at when they are read
]


@pytest.mark.parametrize("overrides", FINE)
def test_compatible_file_options_are_accepted(problems, overrides):
    assert problems(*overrides) == []


def test_positions_are_plain_numbers_in_the_file(load, job):
    text = job.read_text().replace("path: rows.jsonl", "path: rows.csv\n    columns: {0: prompt, 1: completion}")
    assert "columns: {0:" in text
    section = load(text=text).config.data.train
    assert section.named_positions == {0: "prompt", 1: "completion"}
    assert section.has_positions


def test_a_mix_recorded_before_these_keys_existed_is_the_same_mix(load):
    mix = "data.train={mix: [{path: rows.csv, weight: 1.0}, {path: rows.jsonl, weight: 2.0}]}"
    recorded = keys_that_may_differ(load(mix).config)
    assert not [key for key in recorded if key.endswith((".encoding", ".delimiter", ".records", ".quotes"))]
    assert "encoding" not in recorded["data.train.mix"]
