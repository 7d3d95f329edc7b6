import pytest

from finetune.config.yaml import read_yaml
from tests.refusals import pinned


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("2e-5", 2e-5),
        ("1e4", 10000.0),
        ("010", 10),
        ("0x1F", 31),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("True", True),
        ("null", None),
        ("~", None),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("'4'", "4"),
        ("[1, two, 3.0]", [1, "two", 3.0]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_values_are_parsed_as_yaml_1_2(written, value):
    document = read_yaml(f"key: {written}\n")
    assert document.problems == []
    assert document.values == {"key": value}
    assert type(document.values["key"]) is type(value)


def test_every_key_knows_its_line():
    document = read_yaml("a:\n  b: 1\n  c:\n    - 5\n    - {d: 6}\n\ne: 7\n")
    assert document.lines == {"a": 1, "a.b": 2, "a.c": 3, "a.c.0": 4, "a.c.1": 5, "a.c.1.d": 5, "e": 7}


def test_values_written_once_and_used_twice_are_read_twice():
    document = read_yaml("a: &here\n  x: 1\nb: *here\n")
    assert document.values == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("a:\n  b: 1\n  c: 2\n  b: 3\n", 4, "a.b"),
        ("a: 1\nb: 2\na: 3\n", 3, "a"),
        ("a: 1\nb: ${HOME}/x\n", 2, "b"),
        ("a:\nb: 1\n", 1, "a"),
        ("a: b: c\n", 1, ""),
        ("a:\n\tb: 1\n", 2, ""),
        ("a: [1\nb: 2\n", 2, ""),
        ("a: 1\n---\nb: 2\n", 2, ""),
        ("a: *nowhere\n", 1, ""),
        ("a: &a {b: *a}\n", 1, "a.b"),
        ("1: a\n", 1, "1"),
        ("a: !!python/name:os.system x\n", 1, "a"),
        ("%YAML 1.1\n---\na: yes\n", 1, ""),
        ("a: 1\nb: \x07\n", 2, ""),
    ],
)
def test_a_yaml_error_is_reported_with_its_line(text, line, key):
    (problem,) = read_yaml(text).problems
    assert (problem.line, problem.key) == (line, key)
    pinned(problem)


def test_two_yaml_errors_are_reported_at_once():
    document = read_yaml("a: 1\na: 2\nb: ${X}\n")
    assert [problem.line for problem in document.problems] == [2, 3]
    assert document.values == {"a": 1, "b": "${X}"}


def test_an_empty_text_has_no_values():
    assert read_yaml("# nothing here\n").values is None


def test_a_doubled_dollar_before_a_brace_is_the_text_of_a_variable():
    document = read_yaml("a: 'Use $${name} in bash'\nb: $$${x}\nc: [cost $5, $$]\n")
    assert not document.problems
    assert document.values == {"a": "Use ${name} in bash", "b": "$${x}", "c": ["cost $5", "$$"]}
