"""Files as strangers have them: each damage gives one message that says where it is and what to write."""

import gzip

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.source import open_source
from finetune.errors import DataError
from tests.refusals import refused

CONLL = b"EU B-ORG\nrejects O\n\nPeter B-PER\n"
JSONL = b'{"text": "a"}\n{"text": "b"}\n'
CSV = b"label,text\n1,a\n2,b\n"

HINTS = {
    "no header": ("rows.csv", b"3,Wall Street\n4,bears\n", {}, "`finetune preview FILE`"),
    "pipes": ("rows.csv", b"label|text\n1|a\n", {"format": "labelled"}, "`finetune preview FILE`"),
    "a position too far": ("rows.csv", b"3,a\n", {"columns": {"text": 2}}, "position 2"),
    "positions in json": ("rows.jsonl", JSONL, {"columns": {"text": 0}}, "data.train.columns"),
    "a delimiter in json": ("rows.json", b"[]", {"delimiter": ";"}, "data.train.delimiter"),
    "records of a csv": ("rows.csv", CSV, {"records": "data"}, "data.train.records"),
    "an encoding of a table": ("rows.parquet", b"", {"encoding": "cp1252"}, "data.train.encoding"),
}
DAMAGE = {
    "half a row": ("rows.csv", CSV[:-3], {}, "rows.csv, row 2"),
    "mixed delimiters": ("rows.csv", CSV + b"3;c\n", {}, "row 3"),
    "text behind quotes": ("rows.csv", CSV + b'3,"c"d\n', {}, "line 4"),
    "a gap of zeros": ("rows.txt", b"a\n" + bytes(64), {}, "rows.txt, line 2"),
    "zeros in json": ("rows.jsonl", JSONL + bytes(64), {}, "rows.jsonl, line 3"),
    "conll.gz cut off": ("rows.conll.gz", gzip.compress(CONLL * 99)[:-20], {}, ""),
    "empty": ("rows.csv", b"", {}, ""),
    "a header alone": ("rows.csv", b"label,text\n", {}, ""),
    "blank lines alone": ("rows.bio", b"\n\r\n \n", {}, ""),
    "half a sentence": ("rows.conll", CONLL + b"\nlast\n", {}, "rows.conll, line 6"),
    "half an object": ("rows.json", b'{"data": [\n{"te', {"records": "data"}, "rows.json, line 2"),
}


@pytest.mark.parametrize("name", [*HINTS, *DAMAGE])
def test_each_unreadable_file_gives_one_message(tmp_path, name):
    file, content, keys, fact = (HINTS | DAMAGE)[name]
    (tmp_path / file).write_bytes(content)
    with refused(DataError, fact) as error:
        source = open_source(SourceSection(path=str(tmp_path / file), **keys), key="data.train", log=lambda _: None)
        [source.format.read(raw) for raw in source.rows()]
    assert len(str(error.value)) < 1200
    assert "\n" not in str(error.value)


def test_a_column_name_with_a_semicolon_is_read_unchanged(tmp_path):
    (tmp_path / "rows.csv").write_text("a;b\nx;y\n")
    for keys in ({"columns": {"text": "a;b"}}, {"template": {"text": "{{ row['a;b'] }}"}}):
        section = SourceSection(path=str(tmp_path / "rows.csv"), format="text", **keys)
        source = open_source(section, key="data.train", log=lambda _: None)
        assert [source.format.read(raw) for raw in source.rows()] == [{"text": "x;y"}]
