"""Values of `--set` are read as YAML reads a list, and every mistake is named at once."""

import pytest

from finetune.commands.sweep.plan.axes import override_of, parse_axes, shown_value
from finetune.config.yaml import read_yaml
from finetune.errors import ConfigError


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
    key, _, text = override_of("train.key", value).partition("=")
    assert (key, read_yaml(text).values) == ("train.key", value)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["train.steps=1,1"], "the value 1 is written 2 times"),
        (["train.steps=1,,2"], "this is not YAML"),
        (["train.steps=1,2,"], "a value is missing beside a comma"),
        (["train.steps=1],[2"], "this is not YAML"),
        (["train.steps="], "there is no value after `=`"),
        (["train.steps"], "`=` is missing"),
        (["train.steps=1,2", "train.steps=3"], "the key is also in `--set train.steps=1,2`"),
        (["model.lora=null", "model.lora.rank=4,8"], "overlaps with `model.lora`"),
        (["run.folder=a,b"], "each run gets a folder of its own"),
    ],
)
def test_a_mistake_is_named(texts, message):
    with pytest.raises(ConfigError) as error:
        parse_axes(texts)
    assert message in str(error.value)


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        parse_axes(["train.steps=1,1", "train.learning_rate=", "run.folder=x"])
    assert len(error.value.problems) == 3


def test_values_are_shown_as_short_as_they_can_be():
    assert [shown_value(value) for value in (1e-4, 2e-05, 0.1234567891, "cosine", "4", [1, 2], None)] == [
        *("0.0001", "2e-05", "0.1234567891", "cosine", '"4"', "[1, 2]", "null")
    ]
