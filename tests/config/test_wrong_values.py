"""Every key of a job gets values of every wrong kind; what the message advises is accepted, or not advised."""

import math
import re
from collections import Counter
from typing import Any

import pytest
from pydantic import ValidationError

from finetune.config.run_config import RunConfig
from finetune.config.schema import all_keys, items_of, keys_of, node_at
from finetune.config.section import parent_keys
from finetune.config.validation import read_validation_errors
from finetune.config.yaml import read_yaml

WRONG: dict[str, Any] = {
    "text": "word",
    "text with a blank": "two words",
    "text of digits": "5",
    "quoted number": "1e-4",
    "number with a comma": "1,000",
    "quoted truth": "true",
    "yes": "yes",
    "no": "no",
    "path": "runs/rows.jsonl",
    "list as text": "q_proj,v_proj",
    "numbers as text": "0.9, 0.95",
    "nan as text": "nan",
    "inf as text": "inf",
    "nan": math.nan,
    "inf": math.inf,
    "whole number": 5,
    "whole float": 16.0,
    "number": 0.25,
    "negative": -1,
    "zero": 0,
    "true": True,
    "false": False,
    "null": None,
    "none as text": "none",
    "empty": "",
    "blank": "  ",
    "empty list": [],
    "list of one": ["word"],
    "list of a number": [5],
    "list of two": [1, 2],
    "list of a section": [{"name": "word"}],
    "section": {"name": "word"},
    "unicode": "größe\u202e",
    "colon": "a: b",
    "long": "x" * 400,
}
ADVICE = re.compile(r"Did you mean `(.+)`(?:, without quotes)?\? Write ")
EXAMPLE = re.compile(r"text such as `([^`]+)`")


def keys() -> list[str]:
    """Return every dotted key, and those of the sections in lists."""
    found = list(all_keys())
    items = [(f"{key}.0.{name}", node) for key, each in found for name, node in items_of(each).items()]
    return [key for key, _ in [*found, *items]]


def job_with(key: str, value: Any) -> dict[str, Any]:
    """Return the job that has only this key."""
    for part in reversed(key.split(".")):
        value = [value] if part.isdecimal() else {part: value}
    return value


def complaints(key: str, value: Any) -> list[str]:
    """Return what is reported about the key, or about a key in its value, but not about keys that are missing."""
    values = job_with(key, value)
    try:
        RunConfig.model_validate(values)
    except ValidationError as error:
        faults = read_validation_errors(error, values)
        return [str(each.problem()) for each in faults if key in (each.key, *parent_keys(each.key))]
    return []


@pytest.fixture(scope="module")
def messages() -> dict[tuple[str, str], list[str]]:
    """Return what is reported, by key and kind of wrong value."""
    found = {(key, kind): complaints(key, value) for key in keys() for kind, value in WRONG.items()}
    return {case: reported for case, reported in found.items() if reported}


def test_the_advice_of_every_message_is_accepted(messages):
    advised: Counter[str] = Counter()
    for (key, kind), reported in messages.items():
        for text in reported:
            place = text.partition(": ")[0]
            assert place == key or place.startswith(f"{key}."), text
            advice = ADVICE.search(text)
            if advice is not None and place == key:
                document = read_yaml(advice[1])
                assert not document.problems, text
                assert complaints(key, document.values) == [], (kind, text)
                advised[kind] += 1
            for example in EXAMPLE.findall(text):
                assert complaints(place, example) == [], text
    assert len(messages) > 5_000
    assert sum(advised.values()) > 700
    assert not advised.keys() & {"nan", "inf", "long"}  # nothing is meant by these


def test_every_message_names_the_values_to_write(messages):
    for reported in messages.values():
        for text in reported:
            assert re.search("Write |It needs |Its keys are |there is no such key|Name its module", text), text
            assert "Write ." not in text and "``" not in text and "any value" not in text, text
            assert len(text) < 900, text


@pytest.mark.parametrize(
    ("key", "written", "instead"),
    [
        ("train.learning_rate", "1e-4", "1e-4"),
        ("task.name", "pretraining", "pretrain"),
        ("data.shuffle", "true", "true"),
        ("model.freeze", "wte.*", '["wte.*"]'),
        ("train.optimizer.betas", "0.9,0.95", "[0.9, 0.95]"),
        ("task.classification.class_weights", "1, 2", "[1, 2]"),
        ("train.steps", [4], "4"),
        ("train.steps", 16.0, "16"),
    ],
)
def test_the_likely_value_is_advised(key, written, instead):
    (said,) = complaints(key, written)
    assert said.startswith(f"{key}: ")
    assert f"Did you mean `{instead}`" in said


def test_an_unknown_key_is_not_explained_by_a_key_of_another_meaning():
    sections = [key for key in keys() if keys_of(node_at(key)) and "columns" not in key]
    assert len(sections) > 30
    for section in sections:
        for name in ("bias", "model_kind", "weight_name"):
            for said in complaints(section, {name: 1}):
                for other in re.findall(r"There is `([\w.]+)`", said):
                    assert other.rpartition(".")[2] == name, said
    (said,) = complaints("model.lora", {"bias": "all"})
    assert "`model.lora` has `rank`" in said and "quantization" not in said
