"""Jinja texts over a row's columns: what they make, what they cannot reach, and how they say what is wrong."""

import gzip
import json
import pickle
import re
from pathlib import Path

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.formats.row_format import choose_format
from finetune.data.rows import RawRow
from finetune.data.sources.source import open_source
from finetune.data.templates import row_template
from finetune.errors import DataError

HH = Path(__file__).parents[4] / "shared" / "data" / "hh-rlhf" / "harmless-base-test.jsonl.gz"
KEY = "data.train"
ROW = {"question": "2 + 2?", "answer": "4 < 5", "my column": "odd", "tags": ["a", "b"]}

TRANSCRIPT = r"""
[
{%- for part in chosen.split("\n\nHuman: ")[1:] %}
{%- set said = part.split("\n\nAssistant: ") %}
{"role": "user", "content": {{ said[0] | tojson }}}
{%- for answer in said[1:] %}, {"role": "assistant", "content": {{ answer | tojson }}}{% endfor %}
{{ "," if not loop.last }}
{%- endfor %}
]
"""


def read(template, row=ROW, **keys):
    section = SourceSection(path="rows.jsonl", template=template, **keys)
    raw = RawRow("rows.jsonl", 3, row)
    form = choose_format(section, raw, key=KEY, log=lambda _: None)
    return pickle.loads(pickle.dumps(form)).read(raw)


def test_a_text_column_is_the_text_that_its_template_makes():
    row = read({"prompt": "Q: {{ question }}\n", "completion": "{{ answer }}{{ row['my column'] }}"})
    assert [turn["content"] for turn in row["messages"]] == ["Q: 2 + 2?", "4 < 5odd"]


def test_a_column_without_a_template_is_read_unchanged():
    row = read({"prompt": "{{ question }}"}, columns={"completion": "answer"})
    assert row["messages"][1]["content"] == "4 < 5"


def test_turns_are_a_list_of_texts_or_one_text_that_gives_json():
    turns = [
        {"role": "user", "content": "{{ question }}"},
        {"role": "assistant", "content": "{{ answer }}", "weight": 1},
    ]
    as_list = read({"messages": turns})
    as_json = read(
        {"messages": '[{"role": "user", "content": {{ question | tojson }}}, {{ turn | fromjson | tojson }}]'},
        row={**ROW, "turn": json.dumps({"role": "assistant", "content": "4 < 5", "weight": 1})},
    )
    assert as_list == as_json
    assert as_list["messages"][1] == {"role": "assistant", "content": "4 < 5", "weight": 1}


def test_columns_unused_by_row_templates_are_logged():
    said = []
    section = SourceSection(path="x", template={"text": "{{ question }}"})
    choose_format(section, RawRow("f", 1, ROW), key=KEY, log=said.append)
    assert said[1] == f"{KEY}: unused columns: `answer`, `my column`, `tags`"


BAD = [
    (
        {"text": "a\n{{ qestion }}"},
        "row 3: template of `text`, line 2: 'qestion' is undefined. The row's columns are `q",
    ),
    ({"text": "{{ question + 1 }}"}, "line 1: can only concatenate str"),
    ({"text": "{{ tags.append('c') }}"}, "line 1: .*unsafe"),
    ({"text": "{{ ''.__class__.__mro__ }}"}, "line 1: access to attribute '__class__' of 'str' object is unsafe"),
    ({"text": "{% for x in range(10**9) %}{{ x }}{% endfor %}"}, "line 1: Range too big"),
    ({"text": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, "line 1: maximum recursion depth"),
    ({"text": "{% include '/etc/passwd' %}"}, "line 1: no loader"),
    (
        {"text": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"},
        "data.train.template.text: cannot be compiled: .*recursion",
    ),
    ({"text": "{{ tags | random }}"}, "text, line 1: not valid Jinja: No filter named 'random'"),
    ({"text": "\n{% if %}"}, r"data.train.template.text, line 2: not valid Jinja"),
    ({"messages": "[{{ question }}]"}, r"template of `messages` is text that is not JSON: .*\('\[2 \+ 2"),
    ({"messages": "{{ 1 }}"}, "the result of the template of `messages` must be a list of turns"),
    ({"text": [{"role": "user"}]}, "the result of the template of `text` must be text"),
]


@pytest.mark.parametrize(("template", "message"), BAD)
def test_a_template_that_fails_is_named_with_its_line(template, message):
    with pytest.raises(DataError, match=message):
        read(template)


def test_a_row_template_that_writes_too_much_is_named(monkeypatch):
    monkeypatch.setattr(row_template, "MAX_CHARACTERS", 99)
    assert len(read({"text": "{{ 'a' * 99 }}"})["text"]) == 99
    with pytest.raises(DataError, match=r"row 3: .*of `text`.* 100 characters.* 99\."):
        read({"text": "{{ 'a' * 100 }}"})


def test_a_column_that_the_format_has_not_is_refused():
    with pytest.raises(DataError, match=r"data.train.template: format `text` has no column `prompt`"):
        read({"prompt": "{{ question }}"}, format="text")


@pytest.mark.skipif(not HH.is_file(), reason=f"{HH} is not here")
def test_transcripts_become_turns_as_a_plain_parser_finds_them():
    section = SourceSection(path=str(HH), template={"messages": TRANSCRIPT})
    source = open_source(section, key=KEY, log=lambda _: None)
    rows = [source.format.read(raw)["messages"] for raw in source.rows()]
    assert len(rows) == 2312
    lines = gzip.decompress(HH.read_bytes()).splitlines()
    for line, turns in zip(lines, rows, strict=True):
        parts = re.split(r"\n\n(Human|Assistant): ", json.loads(line)["chosen"])
        roles = [{"Human": "user", "Assistant": "assistant"}[name] for name in parts[1::2]]
        assert [(turn["role"], turn["content"]) for turn in turns] == list(zip(roles, parts[2::2], strict=True))
