"""Rules of sources as a table: what is written over the small job, the key that is blamed, a part of the sentence."""

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.resume_keys import keys_that_may_differ

MIX = "data.train={mix: [{path: rows.jsonl, weight: 1.0}, {path: rows.jsonl, weight: 2.0%s}]%s}"
EVALUATED = "evaluate={}"


def mixed(in_second="", beside=""):
    return MIX % (in_second, beside)


def validated(keys):
    return [EVALUATED, f"data.validation={{{keys}}}"]


SOURCES = [
    (["data.train.path=null"], "data.train", "Write `path` (files) or `name` (a hub dataset), or `mix`"),
    (["data.train.name=squad"], "data.train.name", "the rows are already given by `data.train.path`"),
    ([mixed(", name: squad")], "data.train.mix.1.name", "the rows are already given by `data.train.mix.1.path`"),
    (["data.train={name: ./rows}"], "data.train.name", "`./rows` is a path, not a hub dataset"),
    (["data.train={mix: [{weight: 1.0}]}"], "data.train.mix.0", "Write `path` (files) or `name` (a hub dataset)"),
    (validated("exclude_from_train: true"), "data.validation", "hub dataset), or split the training rows (`fraction`"),
    (validated("path: rows.jsonl, fraction: 0.1"), "data.validation.fraction", "given by `data.validation.path`"),
    (validated("fraction: 0.1, hash_fraction: 0.1"), "data.validation.hash_fraction", "the rows are already given by"),
    (["data.train.path=s4://bucket/rows.jsonl"], "data.train.path", "the storage `s4://` is not supported"),
    (["data.train.path=s3://me:secret@bucket/a.jsonl"], "data.train.path", "secrets do not belong in a job file"),
    ([mixed().replace("path: rows", "path: nowhere", 1)], "data.train.mix.0.path", "the file"),
]

FORMATS = [
    (["data.train.format=text"], "data.train.format", "`text` has no turns for `task.name: sft`. Write `mess"),
    (["data.train.format=messages", "task.name=pretrain"], "data.train.format", "Write `text`, or `task.name: sft`"),
    (["data.train.format=preference"], "data.train.format", "To train on the chosen answer: `prompt_"),
    (["data.train.format=labelled"], "data.train.format", "To train the model to write the label: `prompt_completion`"),
    (["data.train.format=labelled", "task.name=pretrain"], "data.train.format", "does not fit `task.name: pretrain`."),
    (["data.train.columns={completed: answer}"], "data.train.columns.completed", "Did you mean `completion`?"),
    (
        ["data.train={path: rows.jsonl, format: messages, columns: {prompt: q}}"],
        "data.train.columns.prompt",
        "It has `messages`, `system`, `tools`, `functions`, `images` and `chat_template_kwargs`",
    ),
    (["data.train.columns={question: prompt}"], "data.train.columns.question", "The format's name goes first:"),
    ([mixed(", columns: {promt: q}")], "data.train.mix.1.columns.promt", "Did you mean `prompt`?"),
    (["data.train.template={promt: q}"], "data.train.template.promt", "Did you mean `prompt`?"),
    (
        ["data.train={path: rows.jsonl, template: {prompt: q}, columns: {prompt: q}}"],
        "data.train.template.prompt",
        "the column is already mapped by `data.train.columns.prompt`",
    ),
    (["data.train.template={prompt: '{% if %}'}"], "data.train.template.prompt", "not valid Jinja in line 1"),
    (
        ["data.train.template={messages: [{role: user, content: '{{'}]}"],
        "data.train.template.messages.0.content",
        "not valid Jinja",
    ),
    (["data.train.template={instruction: [a]}"], "data.train.template.instruction", "of this column must be one text"),
    (["data.train.template={messages: [a]}"], "data.train.template.messages", "a template of turns must be a list of"),
]

IDLE = [
    (["data.train.split=train"], "data.train.split", "rows from a `path` have no split"),
    (["data.train.revision=main"], "data.train.revision", "rows from a `path` have no revision"),
    (validated("path: rows.jsonl, config: en"), "data.validation.config", "rows from a `path` have no config"),
    ([mixed(", split: dev")], "data.train.mix.1.split", "rows from a `path` have no split"),
    ([mixed(beside=", skip: 3")], "data.train.skip", "every source of `data.train.mix` has its own"),
    ([mixed(beside=", format: messages")], "data.train.format", "every source of `data.train.mix` has its own"),
    (["data.train.follow_links=true"], "data.train.follow_links", "folder or glob can contain links to other folders"),
    (validated("fraction: 0.1, take: 5"), "data.validation.take", "the rows come from `data.train`"),
    (validated("hash_fraction: 0.1, format: text"), "data.validation.format", "the rows come from `data.train`"),
    (
        validated("hash_fraction: 0.1, exclude_from_train: true"),
        "data.validation.exclude_from_train",
        "with `hash_fraction`, equal rows are never in both splits",
    ),
]

RIGHT = [
    ["data.train={name: squad, split: dev, config: en, revision: main}"],
    ["data.train.columns={prompt: question, completion: answer}"],
    ["data.train.template={prompt: 'Q: {{ question }}'}", "data.train.columns={completion: answer}"],
    ["task.name=pretrain", "data.train.format=text"],
    ["data.train={path: ., follow_links: true}"],
    ["data.train.path=hf://datasets/me/mine@main/train.jsonl"],
    [mixed(", skip: 1, format: messages, stream: {}"), "data.train.until=all", "train.epochs=null"],
    validated("fraction: 0.1, exclude_from_train: true"),
    validated("hash_fraction: 0.1"),
    validated("path: rows.jsonl, exclude_from_train: true"),
]

TABLE = [*SOURCES, *FORMATS, *IDLE]


@pytest.mark.parametrize(("written", "key", "message"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_combination_that_cannot_be_meant_is_one_problem(problems, written, key, message):
    (problem,) = problems(*written)
    assert problem.key == key
    assert message in problem.message


@pytest.mark.parametrize("written", RIGHT, ids=" ".join)
def test_a_combination_that_can_be_meant_is_let_through(complaints, written):
    assert complaints(*written) == []


def test_a_mistake_in_a_mix_has_its_line_and_its_hint(complaints, job):
    text = job.read_text().replace(
        "    path: rows.jsonl\n",
        "    mix:\n"
        "      - path: rows.jsonl\n"
        "        wieght: 1.0\n"
        "      - path: gone.jsonl\n"
        "        weight: heavy\n"
        "      - {path: rows.jsonl, weight: 1.0, split: dev}\n",
    )
    said = complaints(text=text)
    assert said[0] == "line 9, data.train.mix.0.wieght: there is no such key. Did you mean `weight`?"
    assert said[1].startswith("line 10, data.train.mix.1.path: the file")
    assert said[2].startswith('line 11, data.train.mix.1.weight: `"heavy"` is text. Write a number above 0')
    assert said[3].startswith("line 12, data.train.mix.2.split: it has no effect here")
    assert len(said) == 4


def test_a_resolved_mix_equals_the_written_one(load, tmp_path):
    loaded = load(mixed(", skip: 1"))
    again = load(text=resolved_yaml(loaded))
    assert again.config == loaded.config
    assert again.config.data.train.mix[1].path == str(tmp_path / "rows.jsonl")


@pytest.fixture
def files_of_rows(job):
    for name in ("rows.csv", "rows.json", "rows.conll", "rows.csv.gz", "rows.txt"):
        (job.parent / name).write_text("")


def file_source(**keys):
    written = ", ".join(f"{name}: {value}" for name, value in keys.items())
    return [f"data.train={{{written}}}"]


WRONG_FILE_OPTIONS = [
    (file_source(path="rows.csv", encoding="cp1253x"), "data.train.encoding", "`cp1253x` does not exist. Did you mean"),
    (file_source(path="rows.csv", encoding="base64"), "data.train.encoding", "`base64` does not exist"),
    (file_source(path="rows.csv", encoding="unicode_escape"), "data.train.encoding", "does not exist"),
    (file_source(path="rows.csv", delimiter='"\\""'), "data.train.delimiter", "cannot separate columns"),
    (file_source(path="rows.csv", delimiter='"\\n"'), "data.train.delimiter", "cannot separate columns"),
    (file_source(path="rows.csv", delimiter='";;"'), "data.train.delimiter", ""),
    (file_source(path="rows.csv", columns="{0: 1}"), "data.train.columns.0", "a position maps to a name"),
    (file_source(path="rows.csv", columns="{0: '1'}"), "data.train.columns.0", "a position maps to a name"),
    (file_source(path="rows.csv", columns="{'01': label}"), "data.train.columns.01", "write the position as `1`"),
    (file_source(path="rows.csv", columns="{0: label, 1: label}"), "data.train.columns", "two positions have the"),
    (file_source(path="rows.csv", columns="{text: -1}"), "data.train.columns.text", ""),
    (file_source(path="rows.csv", records="data"), "data.train.records", "`.json` files only, not in `.csv` files"),
    (file_source(path="rows.csv.gz", records="data"), "data.train.records", "`.json` files only, not in `.csv` files"),
    (file_source(path="rows.jsonl", delimiter='";"'), "data.train.delimiter", "not in `.jsonl` files. Remove it."),
    (file_source(path="rows.conll", quotes="false"), "data.train.quotes", "not in `.conll` files"),
    (file_source(path="rows.json", columns="{text: 0}"), "data.train.columns", "columns have positions in"),
    (file_source(name="me/rows", encoding="cp1252"), "data.train.encoding", "not in a hub dataset"),
    (file_source(name="me/rows", columns="{text: 0}"), "data.train.columns", "Write their names."),
]


@pytest.mark.usefixtures("files_of_rows")
@pytest.mark.parametrize(("overrides", "key", "message"), WRONG_FILE_OPTIONS)
def test_the_key_is_blamed(problems, overrides, key, message):
    found = problems(*overrides)
    assert [each.key for each in found if each.key == key] == [key], found
    assert any(message in each.message for each in found)


RIGHT_FILE_OPTIONS = [
    file_source(
        path="rows.csv", encoding="ISO-8859-15", delimiter='"\\t"', quotes="false", columns="{prompt: 0, completion: 1}"
    ),
    file_source(path="rows.csv.gz", encoding="shift_jis", columns="{0: prompt, 1: completion, 2: note}"),
    file_source(path="rows.json", encoding="utf-16", records="data.items"),
    file_source(path="'*.csv'", columns="{0: label, 1: name, prompt: name, completion: 0}"),
    file_source(path=".", delimiter='";"'),  # a folder: its files are looked at when they are read
]


@pytest.mark.usefixtures("files_of_rows")
@pytest.mark.parametrize("overrides", RIGHT_FILE_OPTIONS)
def test_compatible_file_options_are_accepted(problems, overrides):
    assert problems(*overrides) == []


@pytest.mark.usefixtures("files_of_rows")
def test_positions_are_plain_numbers_in_the_file(load, job):
    text = job.read_text().replace("path: rows.jsonl", "path: rows.csv\n    columns: {0: prompt, 1: completion}")
    assert "columns: {0:" in text
    section = load(text=text).config.data.train
    assert section.named_positions == {0: "prompt", 1: "completion"}
    assert section.has_positions


@pytest.mark.usefixtures("files_of_rows")
def test_a_mix_recorded_before_these_keys_existed_is_the_same_mix(load):
    mix = "data.train={mix: [{path: rows.csv, weight: 1.0}, {path: rows.jsonl, weight: 2.0}]}"
    recorded = keys_that_may_differ(load(mix).config)
    assert not [key for key in recorded if key.endswith((".encoding", ".delimiter", ".records", ".quotes"))]
    assert "encoding" not in recorded["data.train.mix"]
