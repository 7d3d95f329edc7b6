"""Turns as rows write them: tools, thoughts and weights are handed on, other tools' shapes are read or refused."""

import pytest

from finetune.data.turns import read_turns
from finetune.errors import DataError
from tests.refusals import refused

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


def call(name, arguments, **identity):
    return {**identity, "type": "function", "function": {"name": name, "arguments": arguments}}


WARM = {"role": "assistant", "content": "Yes."}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("weather", {"city": "Rome"})]}


def test_sharegpt_turns_become_messages():
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Is it warm in Rome?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": "30 degrees"},
        {"role": "gpt", "content": "Yes.", "weight": 0},
    ]
    assert read_turns(turns, title="`conversations`") == [
        {"role": "system", "content": "Be brief."},
        ASKED,
        CALLED,
        {"role": "observation", "content": "30 degrees"},  # the encoder knows whether the template has this role
        {**WARM, "weight": 0},
    ]


QUESTION = "Is it warm in Rome?"
SAME = {
    "Cohere's capitals": [{"role": "USER", "message": QUESTION}, {"role": "CHATBOT", "message": "Yes."}],
    "LangChain's speakers": [{"speaker": "Human", "text": QUESTION}, {"speaker": "AI", "text": "Yes."}],
    "Gemini's parts": [{"role": "user", "parts": [{"text": QUESTION}]}, {"role": "model", "parts": [{"text": "Yes."}]}],
    "Bedrock's texts": [{"role": "user", "content": [{"text": QUESTION}]}, {"role": "Assistant", "content": "Yes."}],
    "questions with their answers": [{"input": QUESTION, "output": "Yes."}],
    "a table that sorts its columns": [{"assistant": "Yes.", "user": QUESTION, "system": None}],
    "one key for each turn": [{"human": QUESTION}, {"gpt": "Yes."}],
    "a history": [[QUESTION, "Yes."]],
    "Open Assistant's prompter": [{"role": "prompter", "text": QUESTION}, {"role": "assistant", "text": "Yes."}],
}


@pytest.mark.parametrize("shape", SAME)
def test_the_shapes_of_other_tools_are_the_same_conversation(shape):
    assert read_turns(SAME[shape], title="`messages`") == [ASKED, WARM]


RESULT = {"role": "tool", "content": "30 degrees", "tool_call_id": "1"}
PROVIDERS = {
    "Anthropic": [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "a"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "30 degrees"}]},
    ],
    "Bedrock": [
        {"role": "user", "content": [{"text": QUESTION}]},
        {
            "role": "assistant",
            "reasoning_content": "Look it up.",
            "content": [
                {"text": "Let me see."},
                {"toolUse": {"toolUseId": "1", "name": "weather", "input": {"city": "Rome"}}},
            ],
        },
        {"role": "user", "content": [{"toolResult": {"toolUseId": "1", "content": [{"text": "30 degrees"}]}}]},
    ],
    "Gemini": [
        {"role": "user", "parts": [{"text": QUESTION}]},
        {
            "role": "model",
            "parts": [
                {"text": "Look it up.", "thought": True},
                {"text": "Let me see."},
                {"functionCall": {"id": "1", "name": "weather", "args": {"city": "Rome"}}},
            ],
        },
        {"role": "user", "parts": [{"functionResponse": {"id": "1", "response": "30 degrees"}}]},
    ],
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_calls_thoughts_and_results_among_the_parts_of_a_provider_are_read(provider):
    assert read_turns(PROVIDERS[provider], title="`messages`") == [
        ASKED,
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "Look it up.",
            "tool_calls": [call("weather", {"city": "Rome"}, id="1")],
        },
        RESULT,
    ]


def test_a_text_after_the_results_of_tools_is_a_turn_of_its_own():
    parts = [{"type": "tool_result", "tool_use_id": "1", "content": [{"json": {"degrees": 30}}]}, "And in Oslo?"]
    assert read_turns([{"role": "user", "content": parts}], title="`messages`") == [
        {**RESULT, "content": '{"degrees": 30}'},
        {"role": "user", "content": "And in Oslo?"},
    ]


def test_several_texts_are_left_to_the_template():
    texts = [{"type": "text", "text": "Hi."}, {"type": "text", "text": "Is it warm?"}]
    assert read_turns([{"role": "user", "content": texts}], title="`messages`") == [{"role": "user", "content": texts}]


def test_the_older_function_call_of_openai_is_a_tool_call():
    turns = [
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"role": "assistant", "content": "Yes.", "function_call": None},
    ]
    assert read_turns(turns, title="`messages`") == [CALLED, WARM]


def test_calls_that_are_turns_of_their_own_belong_to_the_turn_before_them():
    """As in ms-swift: the model ends its turn once, after the last of its calls."""
    turns = [
        {"role": "assistant", "content": "Let me see."},
        {"role": "tool_call", "content": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"role": "tool-call", "content": '[{"name": "weather", "arguments": {"city": "Oslo"}}]'},
        {"role": "tool_call", "content": {"name": "weather", "arguments": {}}, "loss": False},
    ]
    both = [call("weather", {"city": "Rome"}), call("weather", {"city": "Oslo"})]
    assert read_turns(turns, title="`messages`") == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": both},
        {"role": "assistant", "content": None, "tool_calls": [call("weather", {})], "loss": False},
    ]


def function_call(content):
    return [{"from": "function_call", "value": content}]


BAD = [
    ("hello", ""),
    ([], ""),
    ({"text": "a", "id": 1}, "`messages`"),
    (["hello"], "turn 1"),
    ([["a", "b", "c"]], "turn 1"),
    ([ASKED, {"role": "user"}], "turn 2"),
    ([{"content": "a"}], "turn 1"),
    ([{"human": "a", "turn": 1}], "turn 1"),
    ([{}], "turn 1"),
    ([{"role": 5, "content": "a"}], "turn 1"),
    ([{"role": "a b", "content": "a"}], "turn 1"),
    ([{"role": "assistant", "content": None}], "turn 1"),
    ([{"from": "human"}], "turn 1"),
    ([{"input": "a", "output": None}], "turn 1"),
    ([{"role": "user", "content": []}], "turn 1"),
    ([{"role": "user", "content": [{"type": "image"}]}], "turn 1"),
    ([{"role": "user", "content": [{"inlineData": {}}]}], "turn 1"),
    ([{"role": "model", "parts": [{"functionCall": {"args": {}}}]}], "turn 1"),
    ([{"role": "user", "content": [5]}], "turn 1"),
    ([{"role": "user", "content": [{"toolResult": {"toolUseId": "1"}}]}], ""),
    ([{**ASKED, "tool_calls": [1]}], "turn 1"),
    ([{**ASKED, "tool_calls": [{"name": "f", "arguments": "{"}]}], "turn 1"),
    ([{**CALLED, "function_call": {"name": "f"}}], "turn 1"),
    (function_call("weather()"), "turn 1"),
    (function_call('[{"arguments": {}}]'), "turn 1"),
    (function_call(None), "turn 1"),
]


@pytest.mark.parametrize(("turns", "message"), BAD)
def test_an_invalid_turn_is_rejected_by_name(turns, message):
    with refused(DataError, message):
        read_turns(turns, title="`messages`")
