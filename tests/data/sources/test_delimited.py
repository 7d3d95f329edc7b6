"""CSV files as people have them: other delimiters, no header, quotes that are none, and rows of other lengths."""

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources import readers
from finetune.data.sources.source import open_source
from finetune.errors import DataError
from tests.refusals import refused


def section(tmp_path, content, name="rows.csv", **keys):
    (tmp_path / name).write_bytes(content)
    return SourceSection(path=str(tmp_path / name), **keys)


def read(tmp_path, content, name="rows.csv", **keys):
    source = open_source(section(tmp_path, content, name, **keys), key="data.train", log=lambda _: None)
    return [source.format.read(raw) for raw in source.rows()]


ROWS = [{"text": "Wall Street, down", "label": "3"}, {"text": 'the "bears"', "label": "4"}]
NO_HEADER = b'3,"Wall Street, down",x\n4,"the ""bears""",y\n'


@pytest.mark.parametrize("columns", [{"label": 0, "text": 1}, {"0": "label", "1": "text"}, {"0": "label", "text": 1}])
def test_columns_by_position_read_a_file_without_a_header(tmp_path, columns):
    assert read(tmp_path, NO_HEADER, columns=columns) == ROWS


def test_a_template_reads_columns_by_the_names_that_their_positions_are_given(tmp_path):
    template = {"text": "{{ body }} ({{ topic }}, {{ row['0'] }})"}
    rows = read(tmp_path, NO_HEADER, columns={"1": "body", "2": "topic"}, template=template)
    assert rows[0] == {"text": "Wall Street, down (x, 3)"}


def test_without_a_header_the_first_row_is_counted_skipped_and_split_like_any_other(tmp_path):
    content = b"".join(b"%d,row %d\n" % (n % 3, n) for n in range(10))
    keys = {"columns": {"label": 0, "text": 1}}
    assert [row["text"] for row in read(tmp_path, content, skip=2, take=3, **keys)] == ["row 2", "row 3", "row 4"]
    source = open_source(section(tmp_path, content, **keys), key="data.train", log=lambda _: None)
    assert source.num_rows() == 10
    assert [raw.number for raw in source.rows()] == list(range(1, 11))
    assert next(source.shards()[0].rows(7)).location.endswith("rows.csv, row 8")


@pytest.mark.parametrize("delimiter", [";", "|", "\t", ":"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("last", ["", "at the end of each line"])
def test_any_delimiter_and_line_end_give_the_same_rows(tmp_path, delimiter, end, last):
    cells = [["text", "label"], ["Wall Street, down", "3"], ['"the ""bears"""', "4"]]
    lines = [delimiter.join(row) + (delimiter if last else "") for row in cells]
    assert read(tmp_path, end.join(lines).encode(), delimiter=delimiter) == ROWS


def test_quotation_marks_can_be_ordinary_characters(tmp_path):
    content = b'text\tlabel\n"tis\t1\nhe said "no"\t2\n'
    assert [row["text"] for row in read(tmp_path, content, "rows.tsv", quotes=False)] == ['"tis', 'he said "no"']


SWALLOWED = b'text\tlabel\n"tis\t1\nb\t2\nthe end"\t3\n'


def test_rows_that_quotation_marks_would_make_one_are_refused_unless_they_are_meant(tmp_path):
    with refused(DataError, "lines 2", "`quotes: false`", "`quotes: true`"):
        read(tmp_path, SWALLOWED, "rows.tsv")
    assert len(read(tmp_path, SWALLOWED, "rows.tsv", quotes=False)) == 3
    assert read(tmp_path, SWALLOWED, "rows.tsv", quotes=True) == [{"text": "tis\t1\nb\t2\nthe end", "label": "3"}]


def test_a_quotation_mark_that_is_never_closed_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_ROW_BYTES", 1000)
    content = b'text,label\na,1\n"b,2\n' + b"c,3\n" * 1000
    with refused(DataError, "rows.csv, line 3"):
        read(tmp_path, content)


def test_columns_without_a_name_are_called_by_their_position(tmp_path):
    (raw,) = open_source(
        section(tmp_path, b"text;label;;\na;1;;\n", delimiter=";"), key="data.train", log=lambda _: None
    ).rows()
    assert raw.parse() == {"text": "a", "label": "1", "": "", "3": ""}


def test_source_keys_change_the_identity_and_defaults_do_not(tmp_path):
    content = b"text;label\na;1\n"
    found = [
        open_source(section(tmp_path, content, **keys), key="data.train", log=lambda _: None).identity()
        for keys in (
            {"columns": {"text": "text;label"}, "format": "text"},
            {"delimiter": ";"},
            {"delimiter": ";", "quotes": False},
            {"delimiter": ";", "columns": {"text": 0, "label": 1}},
            {"delimiter": ";", "encoding": "latin-1"},
        )
    ]
    assert "read" not in found[0]
    assert [each["read"] for each in found[1:]] == [
        {"delimiter": ";"},
        {"delimiter": ";", "quotes": False},
        {"delimiter": ";", "has_header": False},
        {"delimiter": ";", "encoding": "latin-1"},
    ]
