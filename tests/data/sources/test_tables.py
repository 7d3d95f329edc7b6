"""The names that a dataset gives to whole numbers are found in its files."""

import contextlib
import io
import json
import os
import random
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.local import find_local
from finetune.data.sources.source import open_source
from finetune.data.sources.tables import arrow_rows, class_names, class_names_in, parquet_rows
from finetune.errors import DataError

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
