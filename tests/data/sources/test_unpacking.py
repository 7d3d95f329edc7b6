"""A few kilobytes that stand for gigabytes are refused within their bounds; what people compress is read as it is."""

import gzip
import json
import os
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources import readers, unpacking
from finetune.data.sources.local import find_local
from finetune.errors import DataError

TEXT = "x" * 1_000_000


def rows_of(path):
    origin = find_local(SourceSection(path=str(path)), key="data.train", log=print)
    return [row.parse() for shard in origin.shards() for row in shard.rows()]


def repeated(num_rows, *, is_nested, longest=TEXT):
    """Return a column in which all rows share one text, as it stands in a page of Parquet."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), pa.array([longest]))
    if not is_nested:
        return texts
    turns = pa.StructArray.from_arrays([texts, pa.array(["user"] * num_rows)], ["content", "role"])
    return pa.ListArray.from_arrays(pa.array(range(num_rows + 1), pa.int32()), turns)


def write_table(path, column):
    pq.write_table(
        pa.table({"value": column}), path, compression="zstd", dictionary_pagesize_limit=1 << 30, store_schema=False
    )
    return path


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_parquet_whose_rows_share_one_long_text_is_refused_before_its_rows_are_made(tmp_path, is_nested):
    path = write_table(tmp_path / "rows.parquet", repeated(3000, is_nested=is_nested))
    assert path.stat().st_size < 2000
    with pytest.raises(DataError, match=r"rows.parquet: .* bytes decompress to more than .* over 300 times as much"):
        rows_of(path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_texts_that_stay_in_their_dictionary_are_the_same_rows(tmp_path, monkeypatch, is_nested):
    path = write_table(tmp_path / "rows.parquet", repeated(7, is_nested=is_nested, longest="abc"))
    expected = rows_of(path)
    monkeypatch.setattr(unpacking, "_MAX_BATCH_BYTES", 0)
    assert rows_of(path) == expected and len(expected) == 7
    monkeypatch.setattr(unpacking, "MAX_ROW_BYTES", 2)
    with pytest.raises(DataError, match="a row has more than 0 MB"):
        rows_of(path)


def test_a_parquet_of_rows_without_values_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": pa.nulls(20_000_000, pa.string())}), path, compression="zstd")
    with pytest.raises(DataError, match="over 300 times as much"):
        rows_of(path)


def test_a_gz_of_one_repeated_row_is_refused_and_one_of_different_rows_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "FREE_BYTES", 1 << 20)
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(b"[" + b'{"text": "a"},' * 1_000_000 + b'{"text": "a"}]'))
    with pytest.raises(DataError, match=r"rows.json.gz: .* bytes decompress to more than"):
        rows_of(path)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"text": "number %d"}\n' % n for n in range(100_000))))
    assert len(rows_of(path)) == 100_000


def test_blank_lines_without_end_and_objects_too_large_for_memory_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"\n" * 1_000_002)
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: more than 1,000,000 blank lines start here"):
        rows_of(path)
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", 10)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": [{"text": "a"}]}, indent=1))
    with pytest.raises(DataError, match="Write one object per line"):
        rows_of(path)


def test_an_array_is_read_in_the_memory_of_a_few_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_ARRAY_CHUNK", 1 << 12)
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(json.dumps([{"text": f"number {n}"} for n in range(200_000)]).encode()))
    (shard,) = find_local(SourceSection(path=str(path)), key="data.train", log=print).shards()
    tracemalloc.start()
    assert sum(1 for _ in shard.rows()) == 200_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 10_000)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b" * 50_000}]))
    with pytest.raises(DataError, match=r"rows.json, row 2: has more than .* this is not a row"):
        rows_of(path)


def test_a_file_that_was_never_written_to_its_end_is_refused_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 1000)
    os.truncate(path, 1 << 40)
    with pytest.raises(DataError, match=r"has only zero bytes from byte .* on: the file was not written completely"):
        rows_of(path)
