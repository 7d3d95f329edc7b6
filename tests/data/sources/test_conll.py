"""Sentences of CoNLL files, with their comments and document marks, and lines that are none."""

import pytest

from finetune.config.sections.data import SourceSection
from finetune.data.sources.source import open_source
from finetune.errors import DataError
from tests.refusals import refused

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
    "another width": ("a O\nb X O\n", "line 2"),
    "no tag": ("a O\n\nb\n", "line 3"),
    "words only": ("a\nb\n", "line 1"),
    "nothing": ("\n\n# comment here\n", ""),
    "a position too far": ("a O\n", "position 4"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_conll_line_is_named(tmp_path, name):
    text, fact = BAD[name]
    keys = {"columns": {"tokens": 0, "tags": 4}} if "position" in name else {}
    with refused(DataError, fact):
        rows(tmp_path, text, **keys)
