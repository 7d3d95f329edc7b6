"""Anchors with passages and pairs with scores, as people's columns hold them."""

import pytest

from finetune.errors import DataError
from tests.data.formats.test_row_format import read
from tests.refusals import refused

GROUP = {"anchor": "a", "positive": "p", "negatives": []}
ROWS = {
    "pair": ({"anchor": "a", "positive": "p"}, GROUP),
    "triplet": ({"anchor": "a", "positive": "p", "negative": "n"}, {**GROUP, "negatives": ["n"]}),
    "query": ({"query": "a", "positive": "p", "negatives": ["n", "m"]}, {**GROUP, "negatives": ["n", "m"]}),
    "both": (
        {"query": "a", "positive": "p", "negative": "n", "negatives": '["m"]'},
        {**GROUP, "negatives": ["n", "m"]},
    ),
    "filled up": (
        {"anchor": "a", "positive": "p", "negative": None, "negatives": ["n", None, " "]},
        {**GROUP, "negatives": ["n"]},
    ),
    "none": ({"anchor": "a", "positive": "p", "negative": "", "negatives": ""}, GROUP),
    "scored": ({"sentence1": "a", "sentence2": "b", "score": "0.5"}, {"text": "a", "text_pair": "b", "score": 0.5}),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_columns_decide(name):
    row, expected = ROWS[name]
    assert read(row) == expected


def test_other_names_are_mapped():
    assert read({"question": "a", "answer": "p"}, columns={"anchor": "question", "positive": "answer"}) == GROUP
    template = {"negatives": "{{ [hard_1, hard_2] | tojson }}"}
    assert read({"query": "a", "positive": "p", "hard_1": "n", "hard_2": "m"}, template=template)["negatives"] == [
        "n",
        "m",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"anchor": "a", "positive": "p", "negatives": [1]},
        {"anchor": "a", "positive": "p", "negatives": {"a": 1}},
        {"anchor": "a", "positive": 3},
        {"sentence1": "a", "sentence2": "b", "score": "high"},
    ],
)
def test_an_invalid_text_pair_is_rejected_with_the_reason(row):
    with refused(DataError):
        read(row)
