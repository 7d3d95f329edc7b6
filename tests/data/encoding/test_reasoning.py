"""Which characters of an answer are its reasoning, with templates as TRL ships them; what is no target without it."""

import pytest

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.target_spans import split_reasoning
from finetune.errors import DataError
from tests.data.template_rows import trained_tokenizer
from tests.data.template_tokenizers import shipped_templates, targets, tokenizer_for

TEMPLATES = shipped_templates()
ASKED = {"role": "user", "content": "What is two and two?"}
FUNCTION = {"name": "double", "arguments": {"a": 2}}
CALL = {"id": "call00001", "type": "function", "function": FUNCTION}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}, "required": ["a"]}
TOOLS = [{"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": PARAMETERS}}]
XML_CALL = "<tool_call>\n<function=double>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
JSON_CALL = '<tool_call>\n{"name": "double", "arguments": {"a": 2}}\n</tool_call>'
ANALYSIS = "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant"

# by template: what stands before an answer and is reasoning; that of a call; where there is none; what is said, a call
EXPECTED = {
    "qwen3 qwen3_training": (
        "<think>\nI see.\n</think>\n\n",
        None,
        "<think>\n\n</think>\n\n",
        "Four.<|im_end|>",
        f"{JSON_CALL}<|im_end|>",
    ),
    "qwen3_5_think qwen3_6 qwen3_8": (
        "I see.\n</think>\n\n",
        None,
        "\n</think>\n\n",
        "Four.<|im_end|>",
        f"{XML_CALL}<|im_end|>",
    ),
    "nemotron_3_super": ("I see.\n</think>\n", None, Exception, "Four.<|im_end|>", f"{XML_CALL}\n<|im_end|>"),
    "glm4moe": (
        "\n<think>I see.</think>\n",
        None,
        "\n<think></think>\n",
        "Four.</s>",
        "<tool_call>double\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call></s>",
    ),
    "gptoss": (
        f"{ANALYSIS}<|channel|>final<|message|>",
        ANALYSIS,
        "<|channel|>final<|message|>",
        "Four.<|return|>",
        ' to=functions.double<|channel|>commentary json<|message|>{"a": 2}<|call|>',
    ),
    "gemma4_v5": (
        "<|channel>thought\nI see.\n<channel|>",
        None,
        "",
        "Four.<turn|>",
        "<|tool_call>call:double{a:2}<tool_call|><|tool_response>",
    ),
}
LISTED = {name: expected for names, expected in EXPECTED.items() for name in names.split()}
shipped = pytest.mark.skipif(not TEMPLATES, reason="trl, whose chat templates are the test data, is not installed")


def said(tokenizer, answer, *, reasons, tools=None, turns=(ASKED,), train_on="last_assistant"):
    """Return what is trained on of the answer, with its reasoning or without."""
    row = {"messages": [*turns, answer], "tools": tools}
    (outcome,) = ConversationEncoder(tokenizer, train_on=train_on, train_on_reasoning=reasons)([row])
    if isinstance(outcome, DataError):
        return outcome
    outcome = outcome[-1] if isinstance(outcome, tuple) else outcome
    (stretch,) = targets(outcome, tokenizer)
    return stretch


@shipped
@pytest.mark.parametrize("name", sorted(LISTED))
@pytest.mark.parametrize("train_on", ["last_assistant", "each_assistant"])
def test_reasoning_is_a_target_only_if_requested_and_the_answer_always_is(name, train_on):
    reasoning, of_call, absent, content, call = LISTED[name]
    tokenizer = trained_tokenizer(TEMPLATES[name])
    plain = {"role": "assistant", "content": "Four."}
    thought = {**plain, "reasoning_content": "I see."}
    calling = {"role": "assistant", "content": "", "reasoning_content": "I see.", "tool_calls": [CALL]}
    assert said(tokenizer, thought, reasons=True, train_on=train_on) == reasoning + content
    assert said(tokenizer, thought, reasons=False, train_on=train_on) == content
    if absent is Exception:  # the prompt begins a thought
        assert isinstance(said(tokenizer, plain, reasons=True, train_on=train_on), DataError)
    else:
        assert said(tokenizer, plain, reasons=True, train_on=train_on) == absent + content
        assert said(tokenizer, plain, reasons=False, train_on=train_on) == content
    assert said(tokenizer, calling, reasons=True, tools=TOOLS, train_on=train_on) == (of_call or reasoning) + call
    assert said(tokenizer, calling, reasons=False, tools=TOOLS, train_on=train_on) == call


@shipped
@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "gptoss", "gemma3", "llama3_1", "deepseek_r1_distill_training"])
def test_reasoning_in_the_content_is_found_too(name):
    tokenizer = trained_tokenizer(TEMPLATES[name])
    thought = {"role": "assistant", "content": "<think>\nI see.\n</think>\n\nFour."}
    whole, less = (said(tokenizer, thought, reasons=reasons) for reasons in (True, False))
    assert "I see." in whole
    assert less.startswith("Four.")
    assert whole.endswith(less)


@shipped
def test_an_answer_whose_reasoning_is_left_out_is_counted():
    def dropped(name, train_on="assistant", **answer):
        tokenizer, plain = trained_tokenizer(TEMPLATES[name]), {"role": "assistant", "content": "Six."}
        turns = [ASKED, {"role": "assistant", "content": "Four.", **answer}, ASKED, plain]
        (outcome,) = ConversationEncoder(tokenizer, train_on=train_on)([{"messages": turns}])
        return [
            "dropped_reasoning_rows" in each.findings.flags
            for each in (outcome if isinstance(outcome, tuple) else (outcome,))
        ]

    assert dropped("gemma3", reasoning_content="I see.") == [True]
    assert dropped("lfm2_2_5", reasoning_content="I see.") == [True]
    assert dropped("lfm2_2_5", "last_assistant", reasoning_content="I see.") == [False]  # the turn is no target
    assert dropped("lfm2_2_5", "each_assistant", reasoning_content="I see.") == [False, False]
    assert dropped("qwen3_training", reasoning_content="I see.") == [False]


def test_reasoning_that_the_template_does_not_delimit_is_rejected():
    thought_of = "({{ m.reasoning_content | upper }}) {{ m.reasoning_content }}"
    form = "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}THOUGHT{% endif %}{{ m.content }}</s>"
    form += "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    odd = form.replace("THOUGHT", thought_of)
    thought = {"role": "assistant", "content": "Four.", "reasoning_content": "I see."}
    refused = said(tokenizer_for(odd), thought, reasons=False)
    assert "the end of the reasoning of turn 2 cannot be located in the output of the chat template" in str(refused)
    assert "Set data.train_on_reasoning: true" in str(refused)


@shipped
def test_special_tokens_that_enclose_reasoning_in_the_content_are_text_and_refused():
    tokenizer = tokenizer_for(TEMPLATES["qwen3_8"])  # `<think>` is special here
    thought = {"role": "assistant", "content": "<think>\nI see.\n</think>\n\nFour."}
    assert "are special tokens of this tokenizer" in str(said(tokenizer, thought, reasons=False))


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"content": " Four. "}, ("", "Four.")),
        ({"content": "Four.", "reasoning_content": " I see.\n"}, ("I see.", "Four.")),
        ({"content": "Four.", "thinking": "I see."}, ("I see.", "Four.")),
        ({"content": "<think>I see.</think>\nFour."}, ("I see.", "Four.")),
        ({"content": "I see.</think>\nFour."}, ("I see.", "Four.")),
        ({"content": "[THINK]I see.[/THINK]Four."}, ("I see.", "Four.")),
        ({"content": None}, ("", "")),
        ({"content": [{"type": "text", "text": "Four."}]}, ("", "")),
        ({"content": "Four.", "reasoning_content": ""}, ("", "Four.")),
    ],
)
def test_reasoning_is_split_off(turn, expected):
    assert split_reasoning({"role": "assistant", **turn}) == expected
