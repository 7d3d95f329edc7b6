"""Rules of sources as a table: what is written over the small job, and the key that is blamed."""

import pytest

from finetune.config.explain import resolved_yaml
from finetune.config.resume_keys import keys_that_may_differ
from tests.refusals import pinned

MIX = "data.train={mix: [{path: rows.jsonl, weight: 1.0}, {path: rows.jsonl, weight: 2.0%s}]%s}"
EVALUATED = "evaluate={}"


@pytest.fixture(autouse=True)
def files_of_rows(job):
    for name in ("rows.csv", "rows.json", "rows.conll", "rows.csv.gz", "rows.txt"):
        (job.parent / name).write_text("")


def file_source(**keys):
    written = ", ".join(f"{name}: {value}" for name, value in keys.items())
    return [f"data.train={{{written}}}"]


def mixed(in_second="", beside=""):
    return MIX % (in_second, beside)


def validated(keys):
    return [EVALUATED, f"data.validation={{{keys}}}"]


SOURCES = [
    (["data.train.path=null"], "data.train"),
    (["data.train.name=squad"], "data.train.name"),
    ([mixed(", name: squad")], "data.train.mix.1.name"),
    (["data.train={name: ./rows}"], "data.train.name"),
    (["data.train={mix: [{weight: 1.0}]}"], "data.train.mix.0"),
    (validated("exclude_from_train: true"), "data.validation"),
    (validated("path: rows.jsonl, fraction: 0.1"), "data.validation.fraction"),
    (validated("fraction: 0.1, hash_fraction: 0.1"), "data.validation.hash_fraction"),
    (["data.train.path=s4://bucket/rows.jsonl"], "data.train.path"),
    (["data.train.path=s3://me:secret@bucket/a.jsonl"], "data.train.path"),
    ([mixed().replace("path: rows", "path: nowhere", 1)], "data.train.mix.0.path"),
]

FORMATS = [
    (["data.train.format=text"], "data.train.format"),
    (["data.train.format=messages", "task.name=pretrain"], "data.train.format"),
    (["data.train.format=preference"], "data.train.format"),
    (["data.train.format=labelled"], "data.train.format"),
    (["data.train.format=labelled", "task.name=pretrain"], "data.train.format"),
    (["data.train.columns={completed: answer}"], "data.train.columns.completed"),
    (["data.train={path: rows.jsonl, format: messages, columns: {prompt: q}}"], "data.train.columns.prompt"),
    (["data.train.columns={question: prompt}"], "data.train.columns.question"),
    ([mixed(", columns: {promt: q}")], "data.train.mix.1.columns.promt"),
    (["data.train.template={promt: q}"], "data.train.template.promt"),
    (["data.train={path: rows.jsonl, template: {prompt: q}, columns: {prompt: q}}"], "data.train.template.prompt"),
    (["data.train.template={prompt: '{% if %}'}"], "data.train.template.prompt"),
    (["data.train.template={messages: [{role: user, content: '{{'}]}"], "data.train.template.messages.0.content"),
    (["data.train.template={instruction: [a]}"], "data.train.template.instruction"),
    (["data.train.template={messages: [a]}"], "data.train.template.messages"),
]

IDLE = [
    (["data.train.split=train"], "data.train.split"),
    (["data.train.revision=main"], "data.train.revision"),
    (validated("path: rows.jsonl, config: en"), "data.validation.config"),
    ([mixed(", split: dev")], "data.train.mix.1.split"),
    ([mixed(beside=", skip: 3")], "data.train.skip"),
    ([mixed(beside=", format: messages")], "data.train.format"),
    (["data.train.follow_links=true"], "data.train.follow_links"),
    (validated("fraction: 0.1, take: 5"), "data.validation.take"),
    (validated("hash_fraction: 0.1, format: text"), "data.validation.format"),
    (validated("hash_fraction: 0.1, exclude_from_train: true"), "data.validation.exclude_from_train"),
]

RIGHT = [
    file_source(
        path="rows.csv", encoding="ISO-8859-15", delimiter='"\t"', quotes="false", columns="{prompt: 0, completion: 1}"
    ),
    file_source(path="rows.csv.gz", encoding="shift_jis", columns="{0: prompt, 1: completion, 2: note}"),
    file_source(path="rows.json", encoding="utf-16", records="data.items"),
    file_source(path="'*.csv'", columns="{0: label, 1: name, prompt: name, completion: 0}"),
    file_source(path=".", delimiter='";"'),  # a folder: its files are looked at when they are read
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

FILES = [
    (file_source(path="rows.csv", encoding="cp1253x"), "data.train.encoding"),
    (file_source(path="rows.csv", encoding="base64"), "data.train.encoding"),
    (file_source(path="rows.csv", delimiter='"\\""'), "data.train.delimiter"),
    (file_source(path="rows.csv", delimiter='"\\n"'), "data.train.delimiter"),
    (file_source(path="rows.csv", delimiter='";;"'), "data.train.delimiter"),
    (file_source(path="rows.csv", columns="{0: 1}"), "data.train.columns.0"),
    (file_source(path="rows.csv", columns="{0: '1'}"), "data.train.columns.0"),
    (file_source(path="rows.csv", columns="{'01': label}"), "data.train.columns.01"),
    (file_source(path="rows.csv", columns="{0: label, 1: label}"), "data.train.columns"),
    (file_source(path="rows.csv", columns="{text: -1}"), "data.train.columns.text"),
    (file_source(path="rows.csv", records="data"), "data.train.records"),
    (file_source(path="rows.csv.gz", records="data"), "data.train.records"),
    (file_source(path="rows.jsonl", delimiter='";"'), "data.train.delimiter"),
    (file_source(path="rows.conll", quotes="false"), "data.train.quotes"),
    (file_source(path="rows.json", columns="{text: 0}"), "data.train.columns"),
    (file_source(name="me/rows", encoding="cp1252"), "data.train.encoding"),
    (file_source(name="me/rows", columns="{text: 0}"), "data.train.columns"),
]

TABLE = [*SOURCES, *FORMATS, *FILES, *IDLE]


@pytest.mark.parametrize(("written", "key"), TABLE, ids=[" ".join(row[0]) for row in TABLE])
def test_a_combination_that_cannot_be_meant_is_one_problem(problems, written, key):
    (problem,) = problems(*written)
    assert problem.key == key
    pinned(problem)


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
    first, second, third, fourth = complaints(text=text)
    pinned(first, "line 9, data.train.mix.0.wieght: ", "`weight`")
    pinned(second, "line 10, data.train.mix.1.path: ")
    pinned(third, "line 11, data.train.mix.1.weight: ")
    pinned(fourth, "line 12, data.train.mix.2.split: ")


def test_a_resolved_mix_equals_the_written_one(load, tmp_path):
    loaded = load(mixed(", skip: 1"))
    again = load(text=resolved_yaml(loaded))
    assert again.config == loaded.config
    assert again.config.data.train.mix[1].path == str(tmp_path / "rows.jsonl")


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
