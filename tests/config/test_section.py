"""Every number of a job file has a smallest and a largest value, and neither ends the program."""

from collections.abc import Iterator

import pytest

from finetune.config.explain import format_summary
from finetune.config.schema import Node, branches, items_of, keys_of, run_schema
from tests.refusals import pinned

MANY = 10**30


def numbers(node: Node | None = None, *, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every key that may hold a number, lists and mappings included, with the schema of the number."""
    for name, inner in keys_of(run_schema() if node is None else node).items():
        key = f"{prefix}{name}"
        yield from numbers_in(inner, key=key)
        yield from numbers(inner, prefix=f"{key}.")
        for part, item in items_of(inner).items():
            yield from numbers_in(item, key=f"{key}.0.{part}")
            yield from numbers(item, prefix=f"{key}.0.{part}.")


def numbers_in(node: Node, *, key: str) -> Iterator[tuple[str, Node]]:
    for each in branches(node):
        if each.get("type") in ("integer", "number") and "enum" not in each and "const" not in each:
            yield key, each
        for inner in (each.get("items"), each.get("additionalProperties")):
            if isinstance(inner, dict):
                yield from ((f"{place}.0", number) for place, number in numbers_in(inner, key=key))


FOUND = dict(numbers())


def test_all_sections_were_walked():
    assert len(FOUND) > 100
    assert {"train.steps", "data.train.mix.0.weight", "model.lora.rank_pattern.0"} <= {*FOUND}


@pytest.mark.parametrize("key", FOUND)
def test_a_number_has_both_bounds(key):
    node = FOUND[key]
    assert {"minimum", "exclusiveMinimum"} & {*node}, f"{key}: give it a lower bound"
    assert {"maximum", "exclusiveMaximum"} & {*node}, f"{key}: give it an upper bound (config/section.py)"
    high = node.get("maximum", node.get("exclusiveMaximum"))
    assert high < 2**63


PLAIN = [key for key in FOUND if ".0" not in key]


@pytest.mark.parametrize("key", PLAIN)
def test_a_value_out_of_bounds_is_rejected_with_the_bound(complaints, key):
    high = FOUND[key].get("maximum", FOUND[key].get("exclusiveMaximum"))
    (said,) = [each for each in complaints(f"{key}={MANY}") if f", {key}: " in each]
    assert f"`{MANY}` is not allowed. Write " in said
    assert (f"{high:,.0f}" if isinstance(high, float) and high >= 1000 else f"{high:,}" if high >= 1000 else "") in said


@pytest.mark.parametrize("key", PLAIN)
@pytest.mark.parametrize("value", ["1e308", "-1e308", ".inf", ".nan", "-1e-320"])
def test_no_number_brings_the_checks_down(complaints, key, value):
    assert all(isinstance(each, str) for each in complaints(f"{key}={value}"))


@pytest.mark.parametrize("name", ["minimum", "maximum"])
@pytest.mark.parametrize("key", PLAIN)
def test_the_extremes_themselves_are_checked_like_any_other_number(complaints, key, name):
    bound = FOUND[key].get(name)
    if bound is not None:
        assert not [each for each in complaints(f"{key}={bound}") if f", {key}: `{bound}` is not allowed" in each]


@pytest.mark.parametrize(
    "override",
    [
        "num_hidden_layers=1000000000",
        f"hidden_size={10**40}",
        "attention_dropout=2.0",
        "rope_theta=.nan",
        "text_config={num_hidden_layers: 9999}",
    ],
)
def test_values_of_a_models_config_have_bounds_too(complaints, override):
    own = ["model.name=null", "model.tokenizer={train: {}}", "model.from_config={model_type: llama, values: {}}"]
    (said,) = [each for each in complaints(*own, f"model.from_config.values.{override}") if override in each]
    pinned(said)


def test_a_window_of_lengths_has_to_fit_into_memory(complaints):
    (said,) = complaints("data.batching.length_window_steps=100000000")
    pinned(said, "100,000,000 steps of 8 samples", "12,500,000")


def test_a_large_batch_is_summed_up_at_once(load):
    config = load("train.global_batch_size=16777216", "train.microbatch_size=1").config
    assert "fits on 1, 2, 4, 8," in "\n".join(format_summary(config, num_processes=None))
