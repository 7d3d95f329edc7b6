"""Text in any encoding gives the same rows, and a byte that is none is named by line."""

import gzip
import json

import pyarrow
import pytest

from finetune.data.sources import readers
from finetune.data.sources.local import LocalFile
from finetune.data.sources.readers import ReadOptions
from finetune.errors import DataError
from tests.refusals import refused

TEXTS = ["grün", "ein Café, leer", "naïve", "süß"]
ROWS = [{"text": text, "label": str(number)} for number, text in enumerate(TEXTS)]
KINDS = {
    ".jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS),
    ".json": json.dumps(ROWS, ensure_ascii=False, indent=1),
    ".csv": "text,label\r\n" + "".join(f'"{row["text"]}",{row["label"]}\r\n' for row in ROWS),
    ".tsv": "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in ROWS),
    ".txt": "\n".join(TEXTS),
    ".conll": "\n\n".join("\n".join(f"{word} O" for word in text.split()) for text in TEXTS) + "\n",
}
PACKED = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: pyarrow.Codec("zstd").compress(content, asbytes=True),
}
ENCODINGS = [
    ("utf-8", "utf-8"),
    ("utf-8-sig", None),
    ("utf-16", None),
    ("utf-32", None),
    ("utf-16-le", "utf-16-le"),
    ("utf-16-be", "utf-16-be"),
    ("cp1252", "cp1252"),
    ("latin-1", "ISO-8859-1"),
]


def opened(tmp_path, name, content, encoding=None):
    (tmp_path / name).write_bytes(content)
    return LocalFile(str(tmp_path / name), options=ReadOptions(encoding=encoding))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("written", "key"), ENCODINGS)
def test_every_kind_of_text_gives_the_same_rows_in_every_encoding(tmp_path, kind, written, key):
    plain = [(raw.number, raw.parse()) for raw in opened(tmp_path, f"plain{kind}", KINDS[kind].encode()).rows()]
    assert len(plain) == len(TEXTS)
    for ending, pack in PACKED.items():
        file = opened(tmp_path, f"rows{kind}{ending}", pack(KINDS[kind].encode(written)), key)
        assert [(raw.number, raw.parse()) for raw in file.rows()] == plain
        assert [raw.parse() for raw in file.rows(start=2)] == [row for _, row in plain[2:]]
        assert file.num_rows(at_most=9) == len(TEXTS)


def test_an_undecodable_byte_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_CHUNK_BYTES", 7)  # so that chunks end everywhere
    text = "ab\ncdé\n\nfgh\n"
    whole = text.encode("cp1252")
    for place in range(len(whole)):
        damaged = whole[:place] + b"\x81" + whole[place + 1 :]
        line = whole[:place].count(b"\n") + 1
        with refused(DataError, f"line {line}: ", "byte 0x81"):
            list(opened(tmp_path, "rows.txt", damaged, "cp1252").rows())


def test_a_file_that_ends_in_half_a_character_is_refused(tmp_path):
    for encoding in ("utf-16-le", "utf-16"):
        with refused(DataError, "line 2: ", "byte 0x", "utf-16"):
            list(opened(tmp_path, "rows.txt", "a\nb".encode(encoding)[:-1], "utf-16-le").rows())


@pytest.mark.parametrize("kind", [".txt", ".csv", ".conll", ".jsonl", ".json"])
def test_bytes_that_are_not_utf8_are_named_with_their_line(tmp_path, kind):
    before, after = {
        ".txt": (b"a\n", b"\n"),
        ".csv": (b"text\n", b"\n"),
        ".conll": (b"a O\n", b" O\n"),
        ".jsonl": (b'{"text": "a"}\n{"text": "', b'"}\n'),
        ".json": (b'[{"text": "a"},\n{"text": "', b'"}]\n'),
    }[kind]
    with refused(DataError, f"rows{kind}, line 2: ", "byte 0xe9", "`encoding: cp1252`"):
        [raw.parse() for raw in opened(tmp_path, f"rows{kind}", before + "café".encode("cp1252") + after).rows()]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_byte_order_mark_is_rejected_with_the_encoding_to_write(tmp_path, encoding):
    with refused(DataError, f"`encoding: {encoding}`"):
        list(opened(tmp_path, "rows.csv", "text,label\nabc,1\n".encode(encoding)).rows())


def test_utf16_whose_byte_order_is_unknown_is_rejected_with_the_encoding_to_write(tmp_path):
    with refused(DataError, "`utf-16-le`"):
        list(opened(tmp_path, "rows.csv", b"text,label\nabcd,1\n", "utf-16").rows())
