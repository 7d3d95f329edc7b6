"""Spans of annotation tools become words with IOB2 tags, or are refused with the span and the text at it."""

import pytest

from finetune.errors import DataError
from tests.data.formats.test_row_format import read
from tests.refusals import refused

TEXT = "Anna lives in New York, or so."
PLACES = ["B-PER", "O", "O", "B-LOC", "I-LOC", "O", "O", "O", "O"]
SPANS = {
    "doccano": [[0, 4, "PER"], [14, 22, "LOC"]],
    "Prodigy": [
        {"start": 0, "end": 4, "label": "PER", "token_start": 0},
        {"start": 14, "end": 22, "label": "LOC"},
    ],
    "doccano's relations": [
        {"id": 1, "start_offset": 14, "end_offset": 22, "label": "LOC"},
        {"id": 2, "start_offset": 0, "end_offset": 4, "label": "PER"},
    ],
    "Label Studio": [{"start": 0, "end": 4, "labels": ["PER"]}, {"start": 14, "end": 22, "labels": ["LOC"]}],
    "transformers": [{"start": 0, "end": 4, "entity_group": "PER"}, {"start": 14, "end": 22, "entity_group": "LOC"}],
    "JSON text": '[[0, 4, "PER"], [14, 22, "LOC"]]',
    "a span twice": [[0, 4, "PER"], [0, 4, "PER"], [14, 22, "LOC"]],
}


@pytest.mark.parametrize("tool", SPANS)
def test_spans_become_the_tags_of_words(tool):
    row = read({"text": TEXT, "spans": SPANS[tool]})
    assert row == {"tokens": ["Anna", "lives", "in", "New", "York", ",", "or", "so", "."], "tags": PLACES}


def test_other_names_are_mapped_and_no_span_is_outside():
    assert read({"text": "Hi!", "entities": []}, format="spans", columns={"spans": "entities"}) == {
        "tokens": ["Hi", "!"],
        "tags": ["O", "O"],
    }


def test_null_instead_of_spans_means_that_no_word_is_labelled():
    assert read({"text": "Hi!", "spans": None})["tags"] == [None, None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("don't", ["don", "'", "t"]),
        ("e\u0301te\u0301 क्या", ["e\u0301te\u0301", "क्या"]),
        ("张三在北京", list("张三在北京")),
        ("a_1 2.5€", ["a_1", "2", ".", "5", "€"]),
        (" \n", []),
    ],
)
def test_words_are_runs_of_letters_and_digits(text, words):
    assert read({"text": text, "spans": []})["tokens"] == words


def test_offsets_count_characters_and_not_bytes():
    assert read({"text": "🙂 Zoë!", "spans": [[2, 5, "PER"]]}) == {
        "tokens": ["🙂", "Zoë", "!"],
        "tags": ["O", "B-PER", "O"],
    }


WRONG = [
    [[0, 3, "PER"]],
    [[13, 22, "LOC"]],
    [[14, 99, "LOC"]],
    [[4, 0, "PER"]],
    [[-4, 4, "PER"]],
    [[0, 10, "A"], [5, 13, "B"]],
    [[0, 4, "PER"], [0, 4, "ORG"]],
    [[0, 4]],
    [[0, 4, "PER"], {"start": 0, "label": "PER"}],
    [[True, 4, "PER"]],
    [[0, 4, " "]],
    [[0, 4, None]],
    ["PER"],
    {"PER": [0, 4]},
    "PER",
]


@pytest.mark.parametrize("spans", WRONG)
def test_a_span_that_is_not_made_of_words_is_refused_with_its_text(spans):
    with refused(DataError, "rows.jsonl, row 1"):
        read({"text": TEXT, "spans": spans})


def test_a_list_of_spans_as_label_is_refused_with_the_format_to_write():
    with refused(DataError, "`format: spans`", "`columns: {spans: entities}`"):
        read({"text": TEXT, "entities": [[0, 4, "PER"]]}, columns={"label": "entities"})
