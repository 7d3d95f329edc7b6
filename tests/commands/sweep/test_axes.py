"""Values and ranges of `--set` are read, every mistake is named at once, and run names are readable and safe."""

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from finetune.commands.sweep.axes import (
    bounds_of,
    is_inside,
    parse_axes,
    parse_space,
    run_name,
)
from finetune.config.overrides import override_text
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError, UserError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,2e-4", (1e-4, 2e-4)),
        ("[a, b],[c]", (["a", "b"], ["c"])),
        ("'x,y',null,true", ("x,y", None, True)),
        ("{rank: 4, alpha: 8.0},null", ({"rank": 4, "alpha": 8.0}, None)),
        ("data/a.jsonl,ü,日本", ("data/a.jsonl", "ü", "日本")),
        ("- x\n- y", (["x", "y"],)),
        ("4", (4,)),
        ("4,'4'", (4, "4")),
    ],
)
def test_commas_separate_except_within_brackets_and_quotes(text, values):
    (axis,) = parse_axes([f"train.key={text}"])
    assert axis.values == values
    assert axis.is_swept == (len(values) > 1)


@pytest.mark.parametrize("value", [1e-4, 2e-05, "x: 1", "null", "4", "a,b", [1, "b"], {"rank": 4}, None, True, "ü 😀"])
def test_a_run_is_given_exactly_the_value(value):
    key, _, text = override_text("train.key", value).partition("=")
    assert (key, read_yaml(text).values) == ("train.key", value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["train.steps=1,1"], "the value 1 is written 2 times"),
        (["train.steps=1,,2"], "this is not YAML"),
        (["train.steps=1,2,"], "a value is missing next to a comma"),
        (["train.steps=1],[2"], "this is not YAML"),
        (["train.steps="], "there is no value after `=`"),
        (["train.steps"], "`=` is missing"),
        (["train.steps=1,2", "train.steps=3"], "the key is also in `--set train.steps=1,2`"),
        (["model.lora=null", "model.lora.rank=4,8"], "overlaps with `model.lora`"),
        (["run.folder=a,b"], "each run gets a folder of its own"),
        (["train.learning_rate=1,1.0"], "the value 1 is written 2 times"),
    ],
)
def test_each_mistake_in_the_options_is_reported(texts, message):
    with refused(ConfigError, message):
        parse_axes(texts)


def test_all_mistakes_in_the_options_are_reported_at_once():
    with refused(ConfigError) as error:
        parse_axes(["train.steps=1,1", "train.learning_rate=", "run.folder=x"])
    assert len(error.value.problems) == 3


ODD_VALUES = [
    "a/b/c.jsonl",
    "..",
    "",
    "ü",
    "a b",
    "A" * 501,
    "4",
    4,
    True,
    None,
    "null",
    [1, 2],
    {"rank": 4},
    "x" * 41,
    "\n",
    "\u202e",
]


def test_the_run_name_contains_the_swept_values():
    assert run_name({"train.learning_rate": 1e-4, "model.lora.rank": 8}) == "learning_rate=0.0001,rank=8"
    assert run_name({"data.train.path": "rows/short.jsonl"}).startswith("path=short.jsonl-")
    assert run_name({}) == "run"


def test_odd_values_give_safe_and_different_run_names():
    names = [run_name({"model.name": value}) for value in ODD_VALUES]
    assert len(set(names)) == len(ODD_VALUES)
    for name in names:
        assert name.isascii() and name.isprintable() and len(name) <= 120 and not set(name) & set('/\\ :*?"<>|\n')


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
    space = parse_space(parse_axes([f"train.key={text}", "train.steps=4"]), is_search=True)
    assert space == {"train.key": wanted}


@pytest.mark.parametrize("text", ["1e-3..1e-5", "log:0..1", "../rows.jsonl", "1..x"])
def test_an_invalid_range_is_refused(text):
    with refused(UserError):
        parse_space(parse_axes([f"train.key={text}"]), is_search=True)


def test_a_range_without_a_search_is_refused():
    with refused(UserError, "--search N"):
        parse_space(parse_axes(["train.learning_rate=1e-5..1e-3"]), is_search=False)
    parse_space(parse_axes(["data.train.path=../rows.jsonl,a..b"]), is_search=False)


def test_the_bounds_of_a_space_contain_every_choice_once():
    axes = parse_axes(["a=1..3", "b=x,y,z", "c=5"])
    space = parse_space(axes, is_search=True)
    points = [{"a": 1, "b": "x"}, {"a": 3, "b": "x"}, {"a": 1, "b": "y"}, {"a": 1, "b": "z"}]
    assert list(bounds_of(space, axes)) == points
    assert is_inside({"a": 2, "b": "y"}, space)
    assert not is_inside({"a": 4, "b": "y"}, space) and not is_inside({"a": 2}, space)
