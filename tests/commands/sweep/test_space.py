"""Ranges and choices of `--set` become Optuna's distributions; an invalid range is refused."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from finetune.commands.sweep.axes import parse_axes
from finetune.commands.sweep.space import bounds_of, choices_of, is_inside, parse_space
from finetune.errors import UserError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1e-5..1e-3", FloatDistribution(1e-5, 1e-3, log=True)),
        ("1e-5..1e-4", FloatDistribution(1e-5, 1e-4, log=False)),
        ("log:1e-5..1e-4", FloatDistribution(1e-5, 1e-4, log=True)),
        ("linear:1e-5..1e-3", FloatDistribution(1e-5, 1e-3, log=False)),
        ("0.0..0.1", FloatDistribution(0.0, 0.1, log=False)),
        ("-1..1", IntDistribution(-1, 1, log=False)),
        ("1..64", IntDistribution(1, 64, log=False)),
        ("1..128", IntDistribution(1, 128, log=True)),
        ("cosine,constant", CategoricalDistribution(['"cosine"', '"constant"'])),
    ],
)
def test_a_range_is_read(text, wanted):
    space = parse_space(parse_axes([f"train.key={text}", "train.steps=4"]))
    assert space == {"train.key": wanted}


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
        choices_of(parse_axes(["train.learning_rate=1e-5..1e-3"]))
    choices_of(parse_axes(["data.train.path=../rows.jsonl,a..b"]))


def test_the_bounds_of_a_space_contain_every_choice_once():
    axes = parse_axes(["a=1..3", "b=x,y,z", "c=5"])
    space = parse_space(axes)
    points = [{"a": 1, "b": "x"}, {"a": 3, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "b": "z"}]
    assert list(bounds_of(space, axes)) == points
    assert is_inside({"a": 2, "b": "y"}, space)
    assert not is_inside({"a": 4, "b": "y"}, space) and not is_inside({"a": 2}, space)
