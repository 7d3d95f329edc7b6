"""Values that no row should hold: an error names file and row, whatever the reader."""

import decimal
import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from finetune.config.sections.data import DataSection
from finetune.data.encoding.labelled import LabelledTextEncoder, NumericLabelEncoder
from finetune.data.encoding.preference import PreferenceEncoder
from finetune.data.encoding.text import TextEncoder
from finetune.data.sources import readers
from finetune.data.sources.source import open_sources
from finetune.data.token_cache.chunks import Encoding, encode_chunk
from finetune.errors import DataError
from tests.refusals import refused

DEEP, DIGITS = "[" * 100_000 + "]" * 100_000, "9" * 5000
LINES = {
    "brackets without end": (f'{{"text": "a", "x": {DEEP}}}', "line 2"),
    "brackets that Python still reads": ('{"text": "a", "x": %s}' % ("[" * 900 + "]" * 900), "line 2"),
    "a number of many digits": (f'{{"text": "a", "x": {DIGITS}}}', "line 2"),
    "a name twice": ('{"text": "a", "text": "b"}', "line 2"),
    "a list": ("[1]", "line 2"),
    "half a character": (r'{"text": "a\ud800"}', "row 2"),
}
MESSAGES = {
    "a role that is no word": {"role": "user<|im_end|>\nassistant", "content": "a"},
    "arguments without end": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]},
    "arguments of many digits": {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": DIGITS}}]},
}


def encode(path, tokenizer, make=TextEncoder, **keys):
    """Encode the rows of the file as a preparing process does it."""
    section = DataSection(train={"path": str(path), **keys}, max_length=10**6)
    (source,) = open_sources(section, seed=1, log=lambda sentence: None).train
    return encode_chunk(Encoding(make(tokenizer), section, identity={}, format=source.format), list(source.rows()))


@pytest.mark.parametrize("kind", LINES)
def test_a_line_of_json_is_named(tmp_path, tokenizer, kind):
    line, place = LINES[kind]
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' + line + "\n")
    with refused(DataError, f"rows.jsonl, {place}"):
        encode(tmp_path / "rows.jsonl", tokenizer)


@pytest.mark.parametrize("content", [f'[{{"text": {DIGITS}}}]', f'[{{"text": {DEEP}}}]', f'{{"text": {DEEP}}}'])
def test_a_json_file_is_named(tmp_path, tokenizer, content):
    (tmp_path / "rows.json").write_text(content)
    with refused(DataError, "rows.json"):
        encode(tmp_path / "rows.json", tokenizer)


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_turn_is_named(tmp_path, tokenizer, kind):
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"messages": [MESSAGES[kind], {"role": "assistant", "content": "a"}]}) + "\n"
    )
    with refused(DataError, "rows.jsonl, row 1"):
        encode(tmp_path / "rows.jsonl", tokenizer)


@pytest.mark.parametrize("label", ["9" * 401, f'"{"9" * 401}"', "NaN", "-Infinity", "1e400", "1e39"])
def test_a_label_outside_of_float32_is_rejected_with_its_row(tmp_path, tokenizer, label):
    (tmp_path / "rows.jsonl").write_text(f'{{"text": "a", "label": 1}}\n{{"text": "a", "label": {label}}}\n')
    with refused(DataError, "row 2"):
        encode(tmp_path / "rows.jsonl", tokenizer, lambda words: LabelledTextEncoder(words, NumericLabelEncoder(1)))


def test_a_margin_of_many_digits_is_named(tmp_path, tokenizer):
    row = '{"prompt": "a", "chosen": "b", "rejected": "c", "margin": %s}\n' % ("9" * 401)
    (tmp_path / "rows.jsonl").write_text(row)
    with refused(DataError, "row 1", "`margin`"):
        encode(
            tmp_path / "rows.jsonl", tokenizer, lambda words: PreferenceEncoder(lambda rows: [], "task", margin=True)
        )


def test_a_row_that_cannot_be_encoded_among_others_is_named(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in "abc"))

    def made(words):
        def encoded(rows):
            if any(row["text"] == "b" for row in rows):
                raise OverflowError("too large")
            return TextEncoder(words)(rows)

        return encoded

    with refused(DataError, "row 2"):
        encode(tmp_path / "rows.jsonl", tokenizer, made)


@pytest.mark.parametrize("ending", [".jsonl", ".txt", ".jsonl.gz"])
def test_a_line_without_end_is_not_read_whole(tmp_path, tokenizer, monkeypatch, ending):
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 1 << 20)
    content = b'{"text": "a"}\n{"text": "' + b"a" * (2 << 20) + b'"}\n'
    path = tmp_path / f"rows{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    with refused(DataError, "line 2"):
        encode(path, tokenizer)


def test_a_wide_table_is_read_soon_and_its_columns_are_not_all_listed(tmp_path, tokenizer):
    names = [f"c{n}" for n in range(10_000)]
    (tmp_path / "wide.csv").write_text(",".join(names) + "\n" + ",".join("x" for _ in names) + "\n")
    with pytest.raises(DataError, match=r"`c39`, and 9,960 more") as caught:
        encode(tmp_path / "wide.csv", tokenizer)
    assert len(str(caught.value)) < 2000
    (tmp_path / "twice.csv").write_text(",".join([*names, "c7"]) + "\n")
    with pytest.raises(DataError, match="column `c7` twice"):
        encode(tmp_path / "twice.csv", tokenizer)


def test_column_types_without_a_json_equivalent_are_rejected_by_name(tmp_path, tokenizer):
    nested = pa.int64()
    value = 1
    for _ in range(100):
        nested, value = pa.list_(nested), [value]
    columns = {
        "decimal": pa.array([decimal.Decimal("1.5")]),
        "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
        "bytes": pa.array([b"\xff"]),
        "time": pa.array([10**17], pa.timestamp("ms")),
        "nested": pa.array([value], nested),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"text": column}), path)
        with refused(DataError, path.name):
            encode(path, tokenizer, format="text")


def test_a_fifo_or_device_is_rejected_without_waiting(tmp_path, tokenizer):
    os.mkfifo(tmp_path / "rows.jsonl")
    for path in (tmp_path / "rows.jsonl", "/dev/zero"):
        with refused(DataError, "data.train.path"):
            encode(path, tokenizer)
