"""Rows to predict are read without their labels, by the names that the job gives the other columns."""

import pytest

from finetune.data.formats.columns import ColumnNames, Columns
from finetune.data.formats.unlabeled import (
    read_answers_to_score,
    read_passages_to_rank,
    read_texts_to_embed,
    read_unlabeled_image,
    read_unlabeled_text,
    read_unlabeled_words,
)
from finetune.errors import DataError
from tests.refusals import refused


def columns(row, form="labelled", *, template=None, **names):
    return Columns(ColumnNames(form, names, template or {}, "data.train"), row, origin="/rows/rows.jsonl")


@pytest.mark.parametrize(
    ("row", "names", "template", "expected"),
    [
        ({"text": "Hi."}, {}, {}, {"text": "Hi."}),
        ({"text": "Hi.", "text_pair": "Ho.", "label": ["broken"]}, {}, {}, {"text": "Hi.", "text_pair": "Ho."}),
        ({"review": "Fine."}, {"text": "review", "label": "stars"}, {}, {"text": "Fine."}),
        ({"a": "x", "b": "y"}, {}, {"text": "{{ a }}-{{ b }}", "label": "{{ stars }}"}, {"text": "x-y"}),
    ],
)
def test_a_text_is_read_without_its_label(row, names, template, expected):
    assert read_unlabeled_text(columns(row, template=template, **names)) == expected


def test_a_text_without_its_column_is_refused_by_the_name_of_the_column():
    with refused(DataError, "`review`", "`text`"):
        read_unlabeled_text(columns({"text": "Hi."}, text="review"))


def test_words_are_those_of_the_row_or_of_its_text():
    assert read_unlabeled_words(columns({"tokens": ["New", "York"]}, "tagged")) == {"tokens": ["New", "York"]}
    assert read_unlabeled_words(columns({"text": "In York!"}, "spans")) == {"tokens": ["In", "York", "!"]}
    with refused(DataError, "`tokens`"):
        read_unlabeled_words(columns({"tokens": "New York"}, "tagged"))


def test_an_image_is_found_next_to_its_rows():
    row = read_unlabeled_image(columns({"image": "cat.png"}, "image_label"))
    assert row.keys() == {"image"} and row["image"].name == "/rows/cat.png"


def test_every_text_to_embed_is_a_query_or_a_passage():
    assert read_texts_to_embed(columns({"id": 3, "text": "a"}, "pairs")) == {
        "queries": [],
        "passages": ["a"],
        "texts": {"text": "a"},
    }
    row = {"query": "q", "positive": "p", "negative": "n", "negatives": ["m", ""]}
    assert read_texts_to_embed(columns(row, "retrieval")) == {
        "queries": ["q"],
        "passages": ["p", "n", "m"],
        "texts": {"query": "q", "positive": "p", "negatives": ["n", "m"]},
    }
    with refused(DataError, "`anchor`", "`id`"):
        read_texts_to_embed(columns({"id": 3}, "pairs"))


@pytest.mark.parametrize(
    ("row", "passages"),
    [
        ({"query": "q", "passages": ["a", "b"]}, ["a", "b"]),
        ({"anchor": "q", "positive": "p", "negatives": ["n"]}, ["p", "n"]),
        ({"sentence1": "q", "sentence2": "s"}, ["s"]),
        ({"text": "q", "text_pair": "s"}, ["s"]),
    ],
)
def test_passages_of_a_query_are_read_in_order(row, passages):
    assert read_passages_to_rank(columns(row, "retrieval")) == {"queries": ["q"], "passages": passages}


@pytest.mark.parametrize("row", [{"passages": ["a"]}, {"query": "q"}, {"query": "q", "passages": "a"}])
def test_a_query_without_passages_is_refused(row):
    with refused(DataError):
        read_passages_to_rank(columns(row, "retrieval"))


def test_answers_to_score_are_conversations_by_their_column():
    question = {"role": "user", "content": "Hi."}
    good, bad = ({"role": "assistant", "content": text} for text in ("Hello.", "What?"))
    pair = read_answers_to_score(columns({"prompt": "Hi.", "chosen": "Hello.", "rejected": "What?"}, "preference"))
    assert pair == {"conversations": {"chosen": [question, good], "rejected": [question, bad]}}
    single = read_answers_to_score(columns({"messages": [question, good], "system": "Be kind."}, "preference"))
    system = {"role": "system", "content": "Be kind."}
    assert single == {"conversations": {"messages": [system, question, good]}}
    with refused(DataError, "`messages`"):
        read_answers_to_score(columns({"prompt": "Hi."}, "preference"))
