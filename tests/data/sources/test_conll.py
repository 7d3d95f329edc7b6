"""Sentences of CoNLL files, with their comments and document marks, and lines that are none."""

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.source import open_source
from finetune.errors import DataError

SENTENCES = [(["EU", "rejects", "#"], ["B-ORG", "O", "O"]), (["Peter"], ["B-PER"])]
CONLL_2003 = "-DOCSTART- -X- -X- O\n\nEU NNP B-NP B-ORG\nrejects VBZ B-VP O\n# NN B-NP O\n\n\nPeter NNP B-NP B-PER\n"
TABS = "# id = 1\tdomain\nEU\tB-ORG\nrejects\tO\n#\tO\n \n# a comment\nPeter\tB-PER"


def rows(tmp_path, text, name="rows.conll", **keys):
    (tmp_path / name).write_text(text, newline="")
    section = SourceSection(path=str(tmp_path / name), **keys)
    source = open_source(section, key="data.train", log=lambda _: None)
    return [(row["tokens"], row["tags"]) for row in map(source.format.read, source.rows())]


@pytest.mark.parametrize("name", ["rows.conll", "rows.bio", "rows.iob2"])
@pytest.mark.parametrize("text", [CONLL_2003, TABS, CONLL_2003.replace("\n", "\r\n"), "\ufeff" + TABS])
def test_a_sentence_is_a_row_of_words_and_their_last_column(tmp_path, name, text):
    assert rows(tmp_path, text, name) == SENTENCES


def test_other_columns_are_read_by_position(tmp_path):
    assert rows(tmp_path, CONLL_2003, columns={"tokens": 0, "tags": 1})[1] == (["Peter"], ["NNP"])
    assert rows(tmp_path, CONLL_2003, columns={"0": "tokens", "2": "tags"})[1] == (["Peter"], ["B-NP"])


def test_sentences_are_skipped_taken_and_counted(tmp_path):
    text = "".join(f"w{n} O\n\n" for n in range(6))
    assert [words for words, _ in rows(tmp_path, text, skip=1, take=2)] == [["w1"], ["w2"]]


BAD = {
    "another width": ("a O\nb X O\n", r"line 2: has 3 columns, but the lines before it have 2"),
    "no tag": ("a O\n\nb\n", r"line 3: has 1 column, but the lines before it have 2"),
    "words only": ("a\nb\n", r"line 1: has one column, but each line needs a word and its tag"),
    "nothing": ("\n\n# comment here\n", r"has no rows"),
    "a position too far": ("a O\n", r"columns: there is no column at position 4 in .*rows\.conll: it has 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_conll_line_is_named(tmp_path, name):
    text, message = BAD[name]
    keys = {"columns": {"tokens": 0, "tags": 4}} if "position" in name else {}
    with pytest.raises(DataError, match=message):
        rows(tmp_path, text, **keys)
