"""A preview of any file shows how it would be read, and prints lines of a job that read just that."""

import gzip
import json
import re

import pyarrow
import pyarrow.parquet
import pytest

from finetune.commands.preview.file import preview_file
from finetune.config.load import load_config
from finetune.data.sources.source import open_source
from finetune.errors import DataError, UserError
from finetune.model.processing import train_or_load_tokenizer
from tests.refusals import refused
from tests.small_models import byte_tokenizer

REVIEWS = [("good", "a long walk in the rain, and back"), ("bad", "nothing was there; nobody came"), ("good", "tea")]
CSV = "label{d}text\n" + "".join(f'{label}{{d}}"{text}"\n' for label, text in REVIEWS)
LABELLED = [{"text": text, "label": label} for label, text in REVIEWS]
ITEMS = [{"text": text, "label": label} for label, text in REVIEWS]
WORDS = [{"tokens": text.split(), "tags": ["O"] * len(text.split())} for _, text in REVIEWS]


def parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


FILES = {
    "plain.csv": (CSV.format(d=",").encode(), LABELLED),
    "semi.csv": (CSV.format(d=";").encode(), LABELLED),
    "pipe.csv.gz": (gzip.compress(CSV.format(d="|").encode()), LABELLED),
    "comma.tsv": (CSV.format(d=",").encode(), LABELLED),
    "windows.csv": (CSV.format(d=";").replace("tea", "thé").encode("cp1252"), None),
    "utf16.csv": (CSV.format(d=",").encode("utf-16"), LABELLED),
    "no_header.csv": ("".join(f'{n},"{text}"\n' for n, (_, text) in enumerate(REVIEWS)).encode(), None),
    "other_names.csv": (CSV.format(d=",").replace("label,text", "Sentiment,Review").encode(), LABELLED),
    "lines.jsonl": ("".join(json.dumps(row) + "\n" for row in ITEMS).encode(), LABELLED),
    "array.json": (json.dumps(ITEMS).encode(), LABELLED),
    "nested.json": (json.dumps({"info": {"n": 3}, "data": {"items": ITEMS}}, indent=1).encode(), LABELLED),
    "rows.conll": ("\n\n".join("\n".join(f"{w} O" for w in text.split()) for _, text in REVIEWS).encode(), WORDS),
    "one_row.json": (b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}', None),
    "questions.jsonl": (b'{"question": "2 + 2?", "answer": "4"}\n', None),
}


def job_of(printed, folder):
    """Return the source of the job that the printed lines and the least that is missing make."""
    lines = printed.partition("Add to the job:\n\n")[2]
    rest = (
        "run: {folder: run}\nmodel: {from_config: {model_type: llama}, tokenizer: {train: {}}}\n"
        "train: {global_batch_size: 1, microbatch_size: 1, steps: 1, learning_rate: 1e-3}\n"
    )
    (folder / "job.yaml").write_text(rest + lines)
    return load_config(folder / "job.yaml").config.data.train


@pytest.mark.parametrize("name", FILES)
def test_the_lines_that_are_printed_read_the_rows(tmp_path, capsys, name):
    content, expected = FILES[name]
    (tmp_path / name).write_bytes(content)
    preview_file(str(tmp_path / name), num_rows=2, tokenizer=None)
    printed = capsys.readouterr().out
    source = open_source(job_of(printed, tmp_path), key="data.train", log=lambda _: None)
    rows = [source.format.read(raw) for raw in source.rows()]
    assert len(rows) == int(re.search(r"^rows +(\d+)$", printed, re.MULTILINE)[1])
    assert rows == expected if expected is not None else rows


def test_a_table_is_shown_row_by_row(tmp_path, capsys):
    parquet(tmp_path / "rows.parquet", [{"prompt": f"q{n}", "completion": "a\nb"} for n in range(5)])
    preview_file(str(tmp_path / "rows.parquet"), num_rows=2, tokenizer=None)
    printed = capsys.readouterr().out
    assert "row 2\n  prompt: q1\n  completion: a ↵ b\n" in printed
    assert "row 3" not in printed
    assert "format          `prompt_completion`" in printed
    assert job_of(printed, tmp_path).format == "prompt_completion"


def test_tokens_are_counted_with_a_tokenizer(tmp_path, capsys):
    made = train_or_load_tokenizer(lambda: ["a b"], vocabulary_size=300, cache_folder=tmp_path, log=lambda _: None)
    made.save_pretrained(folder := tmp_path / "own")
    (tmp_path / "rows.txt").write_text("abc\n" + "x" * 70 + "\n")
    preview_file(str(tmp_path / "rows.txt"), num_rows=1, tokenizer=str(folder))
    printed = capsys.readouterr().out
    assert "tokens          median 3, 99% 70, longest 70, total 73" in printed
    assert "max_length: 128  # the longest row has 70 tokens" in printed
    with refused(UserError, "--tokenizer"):
        preview_file(str(tmp_path / "rows.txt"), num_rows=1, tokenizer=str(tmp_path))


def test_lengths_are_those_of_the_rendered_chat_if_the_tokenizer_has_a_template(tmp_path, capsys):
    tokenizer = byte_tokenizer(special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = (
        "{% for turn in messages %}<|im_start|>{{ turn.role }} {{ turn.content }}<|im_end|>{% endfor %}"
    )
    tokenizer.save_pretrained(folder := tmp_path / "own")
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "cdef"}, {"prompt": "ab", "chosen": "c", "rejected": "d"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preview_file(str(tmp_path / "rows.jsonl"), num_rows=1, tokenizer=str(folder))
    ids = tokenizer("<|im_start|>user ab<|im_end|><|im_start|>assistant cdef<|im_end|>")["input_ids"]
    assert f"longest {len(ids)}, total {2 * len(ids) - 3}, with the chat template" in capsys.readouterr().out


def test_every_column_that_is_not_read_is_named_and_other_readings_are_comments(tmp_path, capsys):
    row = {"prompt": "a b", "chosen": "c d", "rejected": "e f", "score_chosen": 3.0, "id": 7}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    preview_file(str(tmp_path / "rows.jsonl"), num_rows=1, tokenizer=None)
    printed = capsys.readouterr().out
    named = re.findall(r"^not read +(.*)$", printed, re.MULTILINE)
    assert [line.split(" ")[0] for line in named] == ["`score_chosen`", "`id`"]
    assert printed.count("\n# task: {name: ") == 2
    assert job_of(printed, tmp_path).format == "preference"


def test_rows_that_are_no_training_rows_get_no_lines_but_what_to_make_of_them(tmp_path, capsys):
    row = {"message_id": "1", "parent_id": None, "role": "prompter", "text": "a b", "rank": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    preview_file(str(tmp_path / "rows.jsonl"), num_rows=1, tokenizer=None)
    printed = capsys.readouterr().out
    assert "Add to the job" not in printed
    assert "one message of a tree" in printed
    assert "parent_id" in printed.partition("row 1")[2].partition("\n\n")[2]


def test_an_unreadable_row_is_reported_after_the_readable_rows_before_it(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("label,text\n" + "1,a\n" * 200 + "2\n")
    with refused(DataError, "rows.csv, row 201", "line 202"):
        preview_file(str(tmp_path / "rows.csv"), num_rows=1, tokenizer=None)
    printed = capsys.readouterr().out
    assert "200, up to one that cannot be read" in printed
    assert "format: labelled" in printed


def test_columns_that_match_no_format_are_shown_with_the_available_formats(tmp_path, capsys):
    squad = {"data": [{"title": "T", "paragraphs": [{"context": "C", "qas": [{"id": 1, "q": "Q"}]}]}]}
    (tmp_path / "squad.json").write_text(json.dumps(squad))
    preview_file(str(tmp_path / "squad.json"), num_rows=1, tokenizer=None)
    printed = capsys.readouterr().out
    assert "No format has the columns `title`, `paragraphs`" in printed
    assert "prompt_completion: `prompt`, `completion`" in printed


REFUSED = {
    "nothing.csv": (None, ""),
    "rows.xlsx": (b"PK", ""),
    "empty.csv": (b"", ""),
    "half.jsonl": (b'{"text": "a"}\n{"te', "line 2"),
    "zeros.txt": (bytes(100), "zero byte"),
    "cut.csv.gz": (gzip.compress(CSV.format(d=",").encode())[:-9], ""),
    "never.csv": (b'text\n"a\nb\n', "line 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_preview_reports_a_bad_file_with_the_message_of_training(tmp_path, name):
    content, fact = REFUSED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with refused(DataError, name, fact):
        preview_file(str(tmp_path / name), num_rows=1, tokenizer=None)


def test_a_folder_of_mixed_kinds_names_them(tmp_path):
    for name in ("a.csv", "b.jsonl"):
        (tmp_path / name).write_text("x\n")
    with refused(DataError, "1 .csv, 1 .jsonl"):
        preview_file(str(tmp_path), num_rows=1, tokenizer=None)


def test_no_text_of_a_row_reaches_the_yaml_unquoted(tmp_path, capsys):
    (tmp_path / "a b: c.csv").write_text('"te: {x}","la#b"\nhello there,1\n')
    preview_file(str(tmp_path / "a b: c.csv"), num_rows=1, tokenizer=None)
    assert "No format has the columns" in capsys.readouterr().out
    (tmp_path / "a b: c.csv").write_text("text,label\nhello there,1\n")
    preview_file(str(tmp_path / "a b: c.csv"), num_rows=1, tokenizer=None)
    assert job_of(capsys.readouterr().out, tmp_path).path.endswith("a b: c.csv")


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("title,body,label\nRain today,It rains,a\nSun again,It is dry,b\n", "{text: title, text_pair: body}"),
        ("3,Wall St. claws,Sellers see green\n4,Oil clouds,Prices are high\n", "{label: 0, text: 1, text_pair: 2}"),
    ],
)
def test_two_columns_of_texts_are_proposed_as_a_pair(tmp_path, capsys, text, columns):
    (tmp_path / "rows.csv").write_text(text)
    preview_file(str(tmp_path / "rows.csv"), num_rows=1, tokenizer=None)
    assert f"columns: {columns}" in capsys.readouterr().out
