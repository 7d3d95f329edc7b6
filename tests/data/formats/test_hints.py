"""Files as strangers have them: each damage gives one message that says where it is and what to write."""

import gzip

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.source import open_source
from finetune.errors import DataError

CONLL = b"EU B-ORG\nrejects O\n\nPeter B-PER\n"
JSONL = b'{"text": "a"}\n{"text": "b"}\n'
CSV = b"label,text\n1,a\n2,b\n"

HINTS = {
    "no header": ("rows.csv", b"3,Wall Street\n4,bears\n", {}, r"no header.*`columns: \{label: 0, text: 1\}`"),
    "no header, known format": (
        "rows.csv",
        b"3,Wall Street\n4,bears\n",
        {"format": "prompt_completion"},
        r"no column `prompt`, `completion`.*`columns: \{prompt: 0, completion: 1\}`",
    ),
    "semicolons": ("rows.csv", b"label;text\n1;a\n", {}, r'single column that contains `;`.*`delimiter: ";"`'),
    "pipes": ("rows.csv", b"label|text\n1|a\n", {"format": "labelled"}, r'`delimiter: "\|"`'),
    "tabs in a csv": ("rows.csv", b"label\ttext\n1\ta\n", {}, r'single column that contains tabs.*`delimiter: "\\t"`'),
    "commas in a tsv": ("rows.tsv", b"label,text\n1,a\n", {}, r'`delimiter: ","`'),
    "a position too far": (
        "rows.csv",
        b"3,a\n",
        {"columns": {"text": 2}},
        "no column at position 2 .* it has 2 columns, 0",
    ),
    "positions in json": ("rows.jsonl", JSONL, {"columns": {"text": 0}}, r"data.train.columns: .*not of \.jsonl"),
    "a delimiter in json": ("rows.json", b"[]", {"delimiter": ";"}, r"data.train.delimiter: .*not of \.json"),
    "records of a csv": ("rows.csv", CSV, {"records": "data"}, r"data.train.records: .*not of \.csv"),
    "an encoding of a table": ("rows.parquet", b"", {"encoding": "cp1252"}, r"data.train.encoding: .*not of \.parquet"),
}
DAMAGE = {
    "half a line": ("rows.jsonl", JSONL[:-6], {}, r"rows\.jsonl, line 2: not valid JSON"),
    "half a row": ("rows.csv", CSV[:-3], {}, r"rows\.csv, row 2 \(line 3\): has 1 fields, but the header has 2"),
    "a row too long": ("rows.csv", CSV + b"3,c,d\n", {}, r"row 3 \(line 4\): has 3 fields, but .* has 2. A comma"),
    "mixed delimiters": ("rows.csv", CSV + b"3;c\n", {}, r"row 3 \(line 4\): has 1 fields, but .* has 2"),
    "never closed": (
        "rows.csv",
        CSV + b'3,"c\n4,d\n',
        {},
        r"line 4: .*not closed before the end of the file \(line 5\)",
    ),
    "text behind quotes": ("rows.csv", CSV + b'3,"c"d\n', {}, r"line 4: not valid CSV.*`quotes: false`"),
    "latin-1": ("rows.csv", CSV + b"3,caf\xe9\n", {}, r"line 4: not UTF-8 text: byte 0xe9 .*`encoding: cp1252`"),
    "a gap of zeros": ("rows.txt", b"a\n" + bytes(64), {}, r"rows\.txt, line 2: has only zero bytes"),
    "zeros in json": ("rows.jsonl", JSONL + bytes(64), {}, r"rows\.jsonl, line 3: not valid JSON"),
    "gz cut off": ("rows.csv.gz", gzip.compress(CSV * 99)[:-20], {}, r"rows\.csv\.gz: cannot be read: Truncated"),
    "conll.gz cut off": ("rows.conll.gz", gzip.compress(CONLL * 99)[:-20], {}, "cannot be read: Truncated"),
    "gz that is none": ("rows.csv.gz", CSV, {}, r"rows\.csv\.gz: cannot be read"),
    "empty": ("rows.csv", b"", {}, "has no rows"),
    "a header alone": ("rows.csv", b"label,text\n", {}, "has no rows"),
    "blank lines alone": ("rows.bio", b"\n\r\n \n", {}, "has no rows"),
    "half a sentence": ("rows.conll", CONLL + b"\nlast\n", {}, r"rows\.conll, line 6: has 1 column"),
    "half an array": ("rows.json", b'[{"text": "a"},\n{"te', {}, r"rows\.json, line 2: not valid JSON"),
    "half an object": ("rows.json", b'{"data": [\n{"te', {"records": "data"}, r"rows\.json, line 2: not valid JSON"),
}


@pytest.mark.parametrize("name", [*HINTS, *DAMAGE])
def test_each_unreadable_file_gives_one_message(tmp_path, name):
    file, content, keys, message = (HINTS | DAMAGE)[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        source = open_source(SourceSection(path=str(tmp_path / file), **keys), key="data.train", log=lambda _: None)
        [source.format.read(raw) for raw in source.rows()]
    assert len(str(error.value)) < 1200
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_a_hundred_thousand_columns_are_one_short_message(tmp_path):
    (tmp_path / "wide.csv").write_bytes(b",".join(b"c%d" % n for n in range(10**5)) + b"\n" + b"," * (10**5 - 1))
    with pytest.raises(DataError, match=r"wide\.csv, row 1: cannot tell the format.*and 99,960 more") as error:
        open_source(SourceSection(path=str(tmp_path / "wide.csv")), key="data.train", log=lambda _: None)
    assert len(str(error.value)) < 1500


def test_a_column_name_with_a_semicolon_is_read_unchanged(tmp_path):
    (tmp_path / "rows.csv").write_text("a;b\nx;y\n")
    for keys in ({"columns": {"text": "a;b"}}, {"template": {"text": "{{ row['a;b'] }}"}}):
        section = SourceSection(path=str(tmp_path / "rows.csv"), format="text", **keys)
        source = open_source(section, key="data.train", log=lambda _: None)
        assert [source.format.read(raw) for raw in source.rows()] == [{"text": "x;y"}]
