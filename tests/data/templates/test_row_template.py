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
from tests.refusals import refused

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


BAD = [
    ({"text": "a\n{{ qestion }}"}, "row 3"),
    ({"text": "{{ question + 1 }}"}, "line 1"),
    ({"text": "{{ tags.append('c') }}"}, "line 1"),
    ({"text": "{{ ''.__class__.__mro__ }}"}, "line 1"),
    ({"text": "{% for x in range(10**9) %}{{ x }}{% endfor %}"}, "line 1"),
    ({"text": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, "line 1"),
    ({"text": "{% include '/etc/passwd' %}"}, "line 1"),
    ({"text": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"}, "data.train.template.text"),
    ({"text": "{{ tags | random }}"}, "line 1"),
    ({"text": "\n{% if %}"}, "data.train.template.text, line 2"),
    ({"messages": "[{{ question }}]"}, "`messages`"),
    ({"messages": "{{ 1 }}"}, "`messages`"),
    ({"text": [{"role": "user"}]}, "`text`"),
]


@pytest.mark.parametrize(("template", "message"), BAD)
def test_a_template_that_fails_is_named_with_its_line(template, message):
    depends_on_stack = "macro" in str(template) or "((((" in str(template)
    with refused(DataError, message, varies=depends_on_stack):
        read(template)


def test_a_row_template_that_writes_too_much_is_named(monkeypatch):
    monkeypatch.setattr(row_template, "MAX_CHARACTERS", 99)
    assert len(read({"text": "{{ 'a' * 99 }}"})["text"]) == 99
    with refused(DataError, "row 3", "`text`", "100 characters", "99"):
        read({"text": "{{ 'a' * 100 }}"})


def test_a_column_that_the_format_has_not_is_refused():
    with refused(DataError, "data.train.template", "`text`", "`prompt`"):
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
