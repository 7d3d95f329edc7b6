"""The names that a dataset gives to whole numbers are found in its files."""

import contextlib
import gzip
import io
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources import readers, tables
from finetune.data.sources.local import find_local
from finetune.data.sources.source import open_source
from finetune.data.sources.tables import arrow_rows, class_names, class_names_in, parquet_rows
from finetune.errors import DataError
from tests.refusals import refused

LABEL = {"names": ["bad", "good"], "_type": "ClassLabel"}
FEATURES = {"text": {"dtype": "string", "_type": "Value"}, "label": LABEL}
TABLE = pa.table({"text": ["a", "b"], "label": [1, 0]})
NAMED = TABLE.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})


@pytest.mark.parametrize(
    "described",
    [LABEL, {"feature": LABEL, "_type": "List"}, {"feature": LABEL, "length": -1, "_type": "Sequence"}, [LABEL]],
)
def test_columns_of_numbers_and_lists_of_them_have_names(described):
    assert class_names({"tags": described, "text": FEATURES["text"]}) == {"tags": ("bad", "good")}


@pytest.mark.parametrize("metadata", [None, {}, {b"huggingface": b"{"}, {b"huggingface": b"[]"}, {b"pandas": b"{}"}])
def test_a_table_without_metadata_has_no_class_names(metadata):
    assert class_names_in(metadata) == {}


def test_class_names_written_by_the_datasets_library_are_read():
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"a": datasets.ClassLabel(names=["x"]), "b": [datasets.ClassLabel(names=["y"])]})
    assert class_names(features.to_dict()) == {"a": ("x",), "b": ("y",)}


def test_class_names_are_read_from_parquet_and_both_arrow_formats(tmp_path):
    pa.parquet.write_table(NAMED, tmp_path / "rows.parquet")
    for name, opened in (("file.arrow", pa.ipc.new_file), ("stream.arrow", pa.ipc.new_stream)):
        with opened(tmp_path / name, NAMED.schema) as writer:
            writer.write_table(NAMED)
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "label": 1}\n')
    paths = {name: SourceSection(path=str(tmp_path / name)) for name in ("rows.parquet", "file.arrow", "stream.arrow")}
    for section in paths.values():
        assert find_local(section, key="k", log=print).class_names() == {"label": ("bad", "good")}
    assert find_local(SourceSection(path=str(tmp_path / "rows.jsonl")), key="k", log=print).class_names() == {}


def test_rows_of_such_a_file_have_the_names(tmp_path):
    pa.parquet.write_table(NAMED, tmp_path / "rows.parquet")
    source = open_source(SourceSection(path=str(tmp_path / "rows.parquet")), key="data.train", log=print)
    assert [source.format.read(raw)["label"] for raw in source.rows()] == ["good", "bad"]


@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_no_flipped_bit_of_a_table_ends_the_process(kind: str):
    """Before each batch was validated, one file of six ended with a segmentation fault."""
    draw = random.Random(3)
    rows = [{"text": "ab\u00e9 " * (i % 9), "turns": [{"content": "x" * (i % 5)}] * (i % 3)} for i in range(600)]
    table, written = pa.Table.from_pylist(rows), io.BytesIO()
    if kind == "parquet":
        pa.parquet.write_table(table, written)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(written, table.schema) as writer:
            writer.write_table(table, max_chunksize=200)
    outcomes = []
    for _ in range(40):
        damaged = bytearray(written.getvalue())
        for _ in range(8):
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        outcomes.append(_outcome_in_a_fork(bytes(damaged), parquet_rows if kind == "parquet" else arrow_rows))
    assert set(outcomes) <= {"read", "refused"} and "refused" in outcomes


def _outcome_in_a_fork(content: bytes, read: Callable[..., Iterator[object]]) -> str:
    pid = os.fork()
    if pid == 0:
        code = 9
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                code = 0 if sum(1 for _ in read(io.BytesIO(content), "rows", 0)) >= 0 else 9
            except DataError:
                code = 2
        os._exit(code)
    return {0: "read", 2: "refused"}.get(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "crashed")


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
    with refused(DataError, "rows.parquet", "300 times", varies=True):
        rows_of(path)


@pytest.mark.parametrize("is_nested", [False, True])
def test_texts_that_stay_in_their_dictionary_are_the_same_rows(tmp_path, monkeypatch, is_nested):
    path = write_table(tmp_path / "rows.parquet", repeated(7, is_nested=is_nested, longest="abc"))
    expected = rows_of(path)
    monkeypatch.setattr(tables, "_MAX_BATCH_BYTES", 0)
    assert rows_of(path) == expected and len(expected) == 7
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 2)
    with refused(DataError):
        rows_of(path)


def test_a_parquet_of_rows_without_values_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": pa.nulls(20_000_000, pa.string())}), path, compression="zstd")
    with refused(DataError, "300 times", varies=True):
        rows_of(path)


def test_a_gz_of_one_repeated_row_is_refused_and_one_of_different_rows_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "FREE_BYTES", 1 << 20)
    path = tmp_path / "rows.json.gz"
    path.write_bytes(gzip.compress(b"[" + b'{"text": "a"},' * 1_000_000 + b'{"text": "a"}]'))
    with refused(DataError, "rows.json.gz", "300 times", varies=True):
        rows_of(path)
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(b'{"text": "number %d"}\n' % n for n in range(100_000))))
    assert len(rows_of(path)) == 100_000


def test_blank_lines_without_end_and_objects_too_large_for_memory_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"\n" * 1_000_002)
    with refused(DataError, "rows.jsonl, line 2", "1,000,000 blank"):
        rows_of(path)
    monkeypatch.setattr(readers, "MAX_JSON_BYTES", 10)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"data": [{"text": "a"}]}, indent=1))
    with refused(DataError):
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
    with refused(DataError, "rows.json, row 2"):
        rows_of(path)


def test_a_file_that_was_never_written_to_its_end_is_refused_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 1000)
    os.truncate(path, 1 << 40)
    with refused(DataError):
        rows_of(path)
