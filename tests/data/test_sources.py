"""Rows of files and of the hub, and what is said when there are none."""

import gzip
import json
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from finetune.config.sections.data import SourceSection
from finetune.data import hub
from finetune.data.sources import open_source, texts
from finetune.errors import DataError

ROWS = [{"prompt": f"question {n}", "completion": f"answer {n}"} for n in range(1, 6)]
KEY = "data.train"


def opened(section, say=lambda _: None):
    return open_source(section, key=KEY, say=say)


def read(section, said=None):
    source = opened(section, (said if said is not None else []).append)
    return [source.format.read(raw) for raw in source.rows()]


def asked(rows):
    return [row["messages"][0]["content"] for row in rows]


def written(tmp_path, kind):
    path = tmp_path / f"rows{kind}"
    lines = "\n".join(json.dumps(row) for row in ROWS) + "\n"
    if kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif kind == ".csv":
        path.write_text("prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in ROWS))
    elif kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_text(json.dumps(ROWS, indent=1) if kind == ".json" else lines)
    return str(path)


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    rows = read(SourceSection(path=written(tmp_path, kind), format="prompt_completion"))
    assert asked(rows) == [f"question {n}" for n in range(1, 6)]
    assert rows[0]["messages"][1] == {"role": "assistant", "content": "answer 1"}


def test_a_json_file_may_hold_json_lines(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert len(read(SourceSection(path=str(path)))) == 5


def test_a_glob_reads_its_files_by_name(tmp_path, write_rows):
    write_rows(ROWS[3:], name="b.jsonl")
    write_rows(ROWS[:3], name="a.jsonl")
    assert asked(read(SourceSection(path=str(tmp_path / "*.jsonl")))) == [f"question {n}" for n in range(1, 6)]


def test_skip_and_take_cut_a_window(write_rows):
    assert asked(read(write_rows(ROWS, skip=1, take=2))) == ["question 2", "question 3"]


def test_the_digest_is_of_content_and_not_of_names(tmp_path, write_rows):
    first = opened(write_rows(ROWS, name="a.jsonl")).identity()
    assert opened(write_rows(ROWS, name="b.jsonl")).identity() == first
    assert opened(write_rows(ROWS[:4], name="b.jsonl")).identity() != first


def test_texts_are_all_that_the_format_reads(write_rows):
    section = write_rows([{"instruction": "Add.", "input": "1 2", "output": "3", "id": "not read"}])
    assert list(texts([opened(section)])) == ["Add.\n\n1 2", "3"]


BAD_FILES = {
    "empty.jsonl": (b"", "data.train: .*empty.jsonl has no rows"),
    "blank.jsonl": (b"\n\n", "has no rows"),
    "header.csv": (b"prompt,completion\n", "has no rows"),
    "broken.jsonl": (
        b'{"text": "a"}\n{"text": \n',
        r"line 2: not valid JSON: Expecting value at column \d+",
    ),
    "list.jsonl": (b"[1, 2]\n", "line 1: a row must be a JSON object with columns, not a list"),
    "latin.jsonl": (b'{"text": "caf\xe9"}\n', "line 1: not UTF-8"),
    "broken.json": (b'[{"text": "a"},\n{"text"]', "broken.json, line 2: not valid JSON"),
    "wide.csv": (b"text\na,b\n", r"row 1 \(line 2\): has not the 1 fields of the header"),
    "broken.parquet": (b"not parquet", "not Parquet that can be read"),
    "broken.jsonl.gz": (b"not gzip", "cannot be read"),
    "rows.xlsx": (b"", r"cannot tell how to read it. Known endings: .jsonl, .json, .csv, .tsv, .txt, .parquet, .arrow"),
    "odd.jsonl": (b'{"a": 1}\n', r"row 1: cannot tell the format from its columns `a`. Set data.train.format"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named_with_the_place(tmp_path, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(SourceSection(path=str(tmp_path / name)))


def test_a_missing_file_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl: there is no such file"):
        read(SourceSection(path=str(tmp_path / "nothing.jsonl")))
    with pytest.raises(DataError, match=r"holds no rows: it has no files.*/\*\*/\*\.jsonl"):
        read(SourceSection(path=str(tmp_path)))


def test_skipping_everything_is_said(write_rows):
    with pytest.raises(DataError, match="has no rows after skip: 5"):
        read(write_rows(ROWS, skip=5))


class FakeHub:
    def __init__(self, result):
        self.result = result
        self.config = SimpleNamespace(HF_HUB_OFFLINE=False)

    def load_dataset(self, *_, **__):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


HUB_ERRORS = [
    (ConnectionError("Couldn't reach the Hub"), "the hub cannot be reached.*or give a local file with `path`"),
    (FileNotFoundError("Dataset 'me/mine' doesn't exist."), "Dataset 'me/mine' doesn't exist. Check `name`"),
    (RuntimeError("Dataset scripts are no longer supported, but found mine.py"), "Python code, which is never run"),
]


@pytest.mark.parametrize(("error", "message"), HUB_ERRORS)
def test_a_hub_dataset_that_cannot_be_had_says_why(monkeypatch, error, message):
    monkeypatch.setattr(hub, "require", lambda *_, **__: FakeHub(error))
    with pytest.raises(DataError, match=f"hub dataset `me/mine`, config main, split test cannot be had: .*{message}"):
        read(SourceSection(name="me/mine", config="main", split="test"))


def test_a_hub_dataset_gives_its_rows(monkeypatch):
    dataset = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(hub, "require", lambda *_, **__: FakeHub(dataset))
    section = SourceSection(name="me/mine", skip=3)
    assert asked(read(section)) == ["question 4", "question 5"]
    assert opened(section).identity()["content"] == dataset._fingerprint
