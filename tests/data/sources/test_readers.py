"""Every kind of file gives the same rows, from any row on, and a bad one is named with the place."""

import gzip
import io
import json

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from finetune.data.sources.local import LocalFile
from finetune.errors import DataError
from tests.refusals import refused

ROWS = [{"prompt": f"question {n}", "completion": f"answer, {n}"} for n in range(1, 6)]


def table(rows):
    return pyarrow.Table.from_pylist(rows)


def arrow(rows, new_writer):
    sink = io.BytesIO()
    with new_writer(sink, table(rows).schema) as writer:
        writer.write_table(table(rows), max_chunksize=2)
    return sink.getvalue()


def parquet(rows):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table(rows), sink, row_group_size=2)
    return sink.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
COMMAS = ("prompt,completion\n" + "".join(f'{r["prompt"]},"{r["completion"]}"\n' for r in ROWS)).encode()
CONTENTS = {
    "rows.jsonl": LINES,
    "windows.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n\r\n"),
    "array.json": json.dumps(ROWS, indent=1).encode(),
    "lines.json": LINES,
    "rows.csv": COMMAS,
    "rows.tsv": ("prompt\tcompletion\n" + "".join(f"{r['prompt']}\t{r['completion']}\n" for r in ROWS)).encode(),
    "rows.parquet": parquet(ROWS),
    "file.arrow": arrow(ROWS, pyarrow.ipc.new_file),
    "stream.ARROW": arrow(ROWS, pyarrow.ipc.new_stream),
    "rows.jsonl.gz": gzip.compress(LINES[:80]) + gzip.compress(LINES[80:]),  # as `cat a.gz b.gz` makes it
    "rows.jsonl.zst": pyarrow.Codec("zstd").compress(LINES, asbytes=True),
    "rows.csv.gz": gzip.compress(COMMAS),
    "array.json.zst": pyarrow.Codec("zstd").compress(json.dumps(ROWS).encode(), asbytes=True),
}


def opened(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    return LocalFile(str(tmp_path / name))


@pytest.mark.parametrize("name", CONTENTS)
def test_every_kind_of_file_gives_the_same_rows_from_any_row_on(tmp_path, name):
    file = opened(tmp_path, name, CONTENTS[name])
    for start in (0, 1, 3, 5, 9):
        assert [raw.parse() for raw in file.rows(start)] == ROWS[start:]
    assert [raw.number for raw in file.rows(3)] == [raw.number for raw in file.rows()][3:]
    assert (file.num_rows(at_most=3), file.num_rows(at_most=9)) == (3, 5)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_every_line_of_a_text_that_is_not_blank_is_a_row(tmp_path, ending):
    content = "\ufeffOnce upon\n\n  a time. \r\n".encode()
    file = opened(tmp_path, f"story.txt{ending}", gzip.compress(content) if ending else content)
    assert [(raw.number, raw.parse()) for raw in file.rows()] == [
        (1, {"text": "Once upon"}),
        (3, {"text": "  a time. "}),
    ]


def test_nulls_filled_in_by_a_table_are_left_out_of_nested_columns(tmp_path):
    rows = [{"turns": [{"role": "a"}, {"role": "b", "name": "c"}], "note": None}]
    (raw,) = opened(tmp_path, "rows.parquet", parquet(rows)).rows()
    assert raw.parse() == rows[0]


def table_twice():
    return pyarrow.table([pyarrow.array(["a"]), pyarrow.array(["b"]), pyarrow.array([1])], names=["text", "text", "x"])


def parquet_twice():
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table_twice(), buffer)
    return buffer.getvalue()


def arrow_twice():
    buffer = io.BytesIO()
    with pyarrow.ipc.new_file(buffer, table_twice().schema) as writer:
        writer.write_table(table_twice())
    return buffer.getvalue()


BAD = {
    "broken.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2"),
    "list.jsonl": (b"[1, 2]\n", "line 1"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "line 1"),
    "latin.txt": (b"a\ncaf\xe9\n", "line 2"),
    "broken.json": (b'[{"text": "a"},\n{"text"]', "line 2"),
    "cut.json": (b'[{"text": "a"},\n{"text": "b"}', "line 2"),
    "twice.json": (b'[{"text": "a"}]\n[]', ""),
    "numbers.json": (b"[1]", "element 1"),
    "nested.json": (b'{\n"version": 1,\n"data": [{"text": "a"}]\n}', "`records: KEY`"),
    "wide.csv": (b"text\na,b\n", "row 1"),
    "narrow.tsv": (b"text\tlabel\na\n", "1 fields"),
    "twice.csv": (b"text,text\na,b\n", "`text`"),
    "quote.csv": (b'text\n"a', "line 2"),
    "broken.parquet": (b"not parquet", ""),
    "broken.arrow": (b"not arrow", ""),
    "twice.parquet": (parquet_twice(), "`text`"),
    "twice.arrow": (arrow_twice(), "`text`"),
    "broken.jsonl.gz": (b"not gzip", ""),
    "half.jsonl.gz": (gzip.compress(LINES)[:-9], ""),
    "half.jsonl.zst": (CONTENTS["rows.jsonl.zst"][:-9], ""),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_the_place(tmp_path, name):
    content, fact = BAD[name]
    with refused(DataError, name, fact):
        [raw.parse() for raw in opened(tmp_path, name, content).rows()]
