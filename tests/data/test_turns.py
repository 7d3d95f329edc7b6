"""Turns as rows write them: tools, thoughts and weights are handed on, other tools' words are understood or refused."""

import pytest

from finetune.data.turns import read_turns
from finetune.errors import DataError

ASKED = {"role": "user", "content": "Is it warm in Rome?"}


def test_message_keys_read_only_by_templates_are_passed_on():
    turns = [
        ASKED,
        {"role": "assistant", "content": "Yes.", "reasoning_content": "It is Rome.", "weight": 1, "name": "weatherman"},
    ]
    assert read_turns(turns, title="`messages`") == turns


def test_a_tool_call_needs_no_content_and_its_arguments_are_read():
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    (turn,) = read_turns([{"role": "assistant", "content": None, "tool_calls": [call]}], title="`messages`")
    assert turn["content"] is None
    assert turn["tool_calls"] == [{**call, "function": {"name": "weather", "arguments": {"city": "Rome"}}}]


def test_nulls_that_a_table_fills_in_are_left_out():
    (turn,) = read_turns([{**ASKED, "tool_calls": None, "name": None, "weight": None}], title="`messages`")
    assert turn == ASKED


def test_one_part_of_text_is_that_text():
    (turn,) = read_turns([{"role": "user", "content": [{"type": "text", "text": "Hi."}]}], title="`messages`")
    assert turn["content"] == "Hi."


def test_sharegpt_turns_become_messages():
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Is it warm in Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "30 degrees"},
        {"role": "gpt", "content": "Yes.", "weight": 0},
    ]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert read_turns(turns, title="`conversations`", from_speakers=True) == [
        {"role": "system", "content": "Be brief."},
        ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "30 degrees"},
        {"role": "assistant", "content": "Yes.", "weight": 0},
    ]


BAD = [
    ("hello", "must be a list of turns .* but is text"),
    (["hello"], "turn 1 must be an object"),
    ([ASKED, {"role": "user"}], "`content` of turn 2 must be text, but is missing"),
    ([{"content": "a"}], "`role` of turn 1 must be text, but is missing"),
    ([{"role": "assistant", "content": None}], "`content` of turn 1 must be text, but is null"),
    ([{"role": "user", "content": [{"type": "image"}]}], "is a list. Only a list with a single text part"),
    ([{**ASKED, "tool_calls": [1]}], "`tool_calls` of turn 1 must be a list of objects"),
    ([{**ASKED, "tool_calls": [{"name": "f", "arguments": "{"}]}], "arguments of a tool call in turn 1 are not JSON"),
    ([{**ASKED, "train": False}], "turn 1 has `train`, which is not supported.*`weight: 0`"),
]


@pytest.mark.parametrize(("turns", "message"), BAD)
def test_an_invalid_turn_is_rejected_by_name(turns, message):
    with pytest.raises(DataError, match=message):
        read_turns(turns, title="`messages`")


BAD_SHAREGPT = [
    ([{"from": "alice", "value": "a"}], "turn 1 is from 'alice'. Supported speakers: `system`, `developer`"),
    ([{"value": "a"}], "turn 1 is from None"),
    ([{"from": "human"}], "`content` of turn 1 must be text, but is null"),
    ([{"from": "function_call", "value": "weather()"}], "turn 1 is a function call that is not JSON"),
    ([{"from": "function_call", "value": "[1]"}], "must be JSON with `name` and `arguments`"),
]


@pytest.mark.parametrize(("turns", "message"), BAD_SHAREGPT)
def test_an_invalid_sharegpt_turn_is_rejected_by_name(turns, message):
    with pytest.raises(DataError, match=message):
        read_turns(turns, title="`conversations`", from_speakers=True)
