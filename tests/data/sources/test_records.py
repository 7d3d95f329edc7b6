"""JSON files whose rows are somewhere inside of one object."""

import json

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.source import open_source
from finetune.errors import DataError
from tests.refusals import refused

ITEMS = [{"text": "a"}, {"text": "b"}]
SQUAD = {
    "version": "1.1",
    "data": [
        {"title": t, "paragraphs": [{"context": c, "qas": [{"q": f"{t}{c}{n}"} for n in (1, 2)]} for c in ("x", "y")]}
        for t in ("S", "T")
    ],
}


def rows(tmp_path, value, indent=None, **keys):
    (tmp_path / "rows.json").write_text(json.dumps(value, indent=indent))
    section = SourceSection(path=str(tmp_path / "rows.json"), **keys)
    return [dict(raw.parse()) for raw in open_source(section, key="data.train", log=lambda _: None).rows()]


@pytest.mark.parametrize("indent", [None, 1])
def test_rows_are_read_from_under_their_key(tmp_path, indent):
    assert rows(tmp_path, {"info": {}, "data": ITEMS}, indent, records="data") == ITEMS
    assert rows(tmp_path, {"data": {"train": {"items": ITEMS}}}, indent, records="data.train.items") == ITEMS
    assert rows(tmp_path, {"data": ITEMS}, indent, records="data", skip=1) == ITEMS[1:]


def test_lists_on_the_way_are_joined_and_their_other_values_added(tmp_path):
    template = {"prompt": "{{ title }} {{ context }}", "completion": "{{ q }}"}
    found = rows(tmp_path, SQUAD, records="data.paragraphs.qas", template=template)
    assert len(found) == 8
    assert found[5] == {"title": "T", "context": "x", "q": "Tx2"}


REFUSED = [
    ({"data": {"items": ITEMS}}, None, "`records: KEY`"),
    ({"data": ITEMS}, "dta", "`dta`"),
    ({"data": {"items": ITEMS}}, "data", ""),
    ({"data": [{"text": "a"}, 3]}, "data", "element 2"),
    ({"data": [{"qas": ITEMS}, {"x": 1}]}, "data.qas", "element 2"),
    (ITEMS, "data", ""),
    ({"data": []}, "data", "data.train: "),
]


@pytest.mark.parametrize(("value", "records", "fact"), REFUSED)
def test_a_wrong_records_key_is_named(tmp_path, value, records, fact):
    with refused(DataError, "rows.json", fact):
        rows(tmp_path, value, 1, **({"records": records} if records else {}))
