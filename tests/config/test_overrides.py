import pytest

from finetune.config.overrides import apply_overrides
from finetune.errors import ConfigError
from tests.refusals import pinned, refused


def test_an_override_replaces_one_key_and_leaves_the_argument_alone():
    values = {"train": {"steps": 10, "learning_rate": 1e-4}}
    assert apply_overrides(values, ["train.steps=20"]).values == {"train": {"steps": 20, "learning_rate": 1e-4}}
    assert values["train"]["steps"] == 10


def test_the_value_is_yaml():
    written = ["a=2e-5", "b=null", "c=[x, 1]", "d={e: true}", "f=a=b", "g='1'"]
    assert apply_overrides({}, written).values == {
        "a": 2e-5,
        "b": None,
        "c": ["x", 1],
        "d": {"e": True},
        "f": "a=b",
        "g": "1",
    }


def test_sections_that_are_missing_or_null_are_made():
    assert apply_overrides({"evaluate": None}, ["evaluate.generate.show=1"]).values == {
        "evaluate": {"generate": {"show": 1}}
    }


def test_the_last_override_of_a_key_counts():
    result = apply_overrides({}, ["a.b=1", "a={c: 2}", "a.c=3"])
    assert result.values == {"a": {"c": 3}}
    assert {key: str(source) for key, source in result.sources.items()} == {"a": "--set a={c: 2}", "a.c": "--set a.c=3"}


def test_an_item_of_a_list_can_be_replaced():
    assert apply_overrides({"a": [1, 2]}, ["a.1=5"]).values == {"a": [1, 5]}


@pytest.mark.parametrize(
    "written",
    [
        "train.steps",
        "=5",
        "train..steps=5",
        "train .steps=5",
        "train.steps=",
        "train.steps=[1",
        "train.steps=${STEPS}",
        "train.steps.x=5",
        "train.list.7=5",
    ],
)
def test_an_override_that_cannot_be_done_is_named(written):
    result = apply_overrides({"train": {"steps": 1, "list": [1, 2]}}, [written])
    (problem,) = result.problems
    assert problem.source == f"--set {written}"
    pinned(problem)
    assert result.values == {"train": {"steps": 1, "list": [1, 2]}}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("train.stepps=4", "--set train.stepps=4"),
        ("a.api_key=c0ffee", "--set a.api_key=[redacted]"),
        ("a={n: 1, api_key: c0ffee}", "--set a={n: 1, api_key: [redacted]}"),
        ("a=https://h/?sig=c0ffee", "--set a=https://h/?sig=[redacted]"),
    ],
)
def test_a_problem_names_the_override_without_its_secret(load, text, named):
    with refused(ConfigError) as caught:
        load(text)
    assert caught.value.problems[0].source == named
