"""Ranges of a search: whole or not, logarithmic or not, and what is wrong with them."""

import pytest

from finetune.commands.sweep.axes import parse_axes
from finetune.commands.sweep.space import (
    Choices,
    Range,
    bounds_of,
    is_inside,
    parse_space,
    require_no_ranges,
)
from finetune.errors import UserError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1e-5..1e-3", Range(1e-5, 1e-3, True)),
        ("1e-5..1e-4", Range(1e-5, 1e-4, False)),
        ("log:1e-5..1e-4", Range(1e-5, 1e-4, True)),
        ("linear:1e-5..1e-3", Range(1e-5, 1e-3, False)),
        ("0.0..0.1", Range(0.0, 0.1, False)),
        ("-1..1", Range(-1, 1, False)),
        ("1..64", Range(1, 64, False)),
        ("1..128", Range(1, 128, True)),
        ("cosine,constant", Choices(("cosine", "constant"))),
    ],
)
def test_a_range_is_read(text, wanted):
    space = parse_space(parse_axes([f"train.key={text}", "train.steps=4"]))
    assert space == {"train.key": wanted}
    assert isinstance(wanted, Choices) or wanted.is_whole == isinstance(wanted.low, int)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1e-3..1e-5", "Write the smaller number first"),
        ("log:0..1", "cannot begin at 0"),
        ("../rows.jsonl", "nothing varies"),
        ("1..x", "nothing varies"),
    ],
)
def test_an_invalid_range_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse_space(parse_axes([f"train.key={text}"]))


def test_a_range_without_a_search_is_refused():
    with pytest.raises(UserError, match="a range needs --search N"):
        require_no_ranges(parse_axes(["train.learning_rate=1e-5..1e-3"]))
    require_no_ranges(parse_axes(["data.train.path=../rows.jsonl,a..b"]))


def test_the_bounds_of_a_space_contain_every_choice_once():
    space = {"a": Range(1, 3, False), "b": Choices(("x", "y", "z"))}
    assert list(bounds_of(space)) == [{"a": 1, "b": "x"}, {"a": 3, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "b": "z"}]
    assert is_inside({"a": 2, "b": "y"}, space)
    assert not is_inside({"a": 4, "b": "y"}, space) and not is_inside({"a": 2}, space)
