"""The names that a dataset gives to whole numbers are found in its files."""

import json

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.local import find_local
from finetune.data.sources.tables import class_names, class_names_in

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
