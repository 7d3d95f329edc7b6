"""The targets with the chat templates of real models, as TRL ships them, against expectations checked by hand.

`pytest -s` prints the table. `refused` stands for what a template cannot do, with the beginning of the reason.
"""

from dataclasses import dataclass
from functools import cache

import pytest

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.template_check import CASES
from finetune.errors import DataError
from tests.data.template_tokenizers import END, shipped_templates, targets, tokenizer_for

TEMPLATES = shipped_templates()


@dataclass(frozen=True)
class Refused:
    """A part of the reason why a conversation cannot be trained on."""

    reason: str


ALTERNATE = Refused("Conversation roles must alternate")
NO_TOOLS = Refused("drops the `tools` of the row")
NO_CALLS = Refused("drops `tool_calls` of assistant turns")
OTHER_CUE = Refused("renders the prompt of turn")
OTHER_TURN = Refused("renders turn 2 differently")

QWEN_CALL = '<tool_call>\n{"name": "double", "arguments": {"a": 2}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=double>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
GEMMA_CALL = "<|tool_call>call:double{a:2}<tool_call|>"
GLM_CALL = "<tool_call>double\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
ATEM_CALL = (
    '<atem:function_calls>\n<atem:invoke name="double">\n<atem:parameter name="a">2</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>"
)
OPENAI_CALL = ' to=functions.double<|channel|>commentary json<|message|>{"a": 2}<|call|>'
DEEPSEEK, DEEPSEEK_END = "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
NO_THOUGHT = "<think>\n\n</think>\n\n"
AFTER_THOUGHT = "\n</think>\n\n"  # where the prompt ends in <think> and a line break


def says(before, end, call=None):
    """Return the targets where each answer stands between `before` and `end`, and so does a call of a tool."""
    tools = call if isinstance(call, Refused) else [f"{before}{call}{end}", f"{before}Four.{end}"]
    return [f"{before}Four.{end}", f"{before}Six.{end}"], [f"{before}Four.{end}"], tools


# by template: the targets of several answers, of a conversation with a system message, and of one with tools
EXPECTED = {
    "cohere cohere_training": says("", "<|END_OF_TURN_TOKEN|>", ALTERNATE),
    "cohere2 cohere2_training": says("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", ALTERNATE),
    "deepseek_r1_distill": (OTHER_CUE, OTHER_CUE, OTHER_CUE),
    "deepseekv3": (OTHER_CUE, OTHER_CUE, Refused('can only concatenate str (not "dict") to str')),
    # the markers of these enclose the mark of the assistant
    "deepseek_r1_distill_training deepseekv3_training": says(DEEPSEEK, DEEPSEEK_END, NO_TOOLS),
    # a call is ended by the mark of the response; after one, the assistant has to begin a turn of its own
    "diffusion_gemma": (
        *says("", "<turn|>", NO_TOOLS)[:2],
        [f"{GEMMA_CALL}<|tool_response>", "<|turn>model\nFour.<turn|>"],
    ),
    "diffusion_gemma_training": (*says("", "<turn|>", NO_TOOLS)[:2], [GEMMA_CALL, "Four.<turn|>"]),
    "gemma gemma_training": (
        ["Four.<end_of_turn>", "Six.<end_of_turn>"],
        Refused("System role not supported"),
        ALTERNATE,
    ),
    "gemma3 gemma3_training": says("", "<end_of_turn>", ALTERNATE),
    "gemma4 gemma4_v3 gemma4_v4 gemma4_v5": (
        *says("", "<turn|>", NO_TOOLS)[:2],
        [f"{GEMMA_CALL}<|tool_response>", "Four.<turn|>"],
    ),
    "gemma4_v2": says("", "<turn|>", GEMMA_CALL),
    # no end of turn: end-of-sequence after the last answer; the training variant trains on the mark that follows
    "glm4moe": (
        ["\n<think></think>\nFour.", f"\n<think></think>\nSix.{END}"],
        [f"\n<think></think>\nFour.{END}"],
        [f"\n<think></think>\n{GLM_CALL}", f"\n<think></think>\nFour.{END}"],
    ),
    "glm4moe_training": (
        *says("\n<think></think>\n", "<|user|>", NO_TOOLS)[:2],
        [f"\n<think></think>\n{GLM_CALL}<|observation|>", "\n<think></think>\nFour.<|user|>"],
    ),
    "gptoss": (
        OTHER_TURN,
        ["<|channel|>final<|message|>Four.<|return|>"],
        [OPENAI_CALL, "<|channel|>final<|message|>Four.<|return|>"],
    ),
    "gptoss_training": (
        [
            "<|start|>assistant<|channel|>final<|message|>Four.<|end|>",
            "<|start|>assistant<|channel|>final<|message|>Six.<|return|>",
        ],
        ["<|start|>assistant<|channel|>final<|message|>Four.<|return|>"],
        [f"<|start|>assistant{OPENAI_CALL}", "<|start|>assistant<|channel|>final<|message|>Four.<|return|>"],
    ),
    "idefics3 idefics3_training smolvlm smolvlm_training": says(" ", "<end_of_utterance>", NO_TOOLS),
    "lfm2 lfm2_training": says("", "<|im_end|>", NO_CALLS),
    "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2 lfm2_v2_training": says(
        "", "<|im_end|>", "<|tool_call_start|>[double(a=2)]<|tool_call_end|>"
    ),
    "llama3 llama3_training": says("", "<|eot_id|>", NO_TOOLS),
    "llama3_1 llama3_2": says("", "<|eot_id|>", '{"name": "double", "parameters": {"a": 2}}'),
    "llava_next llava_next_training": says(" ", END, Refused("Only user and assistant roles are supported!")),
    "muse_glimmer": (
        *says(" to=user<|message|>", "<|eot|>", NO_TOOLS)[:2],
        [f" to=double<|message|>{ATEM_CALL}<|eot|>", " to=user<|message|>Four.<|eot|>"],
    ),
    "muse_glimmer_training": (
        *says("<|start|>assistant to=user<|message|>", "<|eot|>", NO_TOOLS)[:2],
        [
            f"<|start|>assistant to=double<|message|>{ATEM_CALL}<|eot|>",
            "<|start|>assistant to=user<|message|>Four.<|eot|>",
        ],
    ),
    "nemotron_3_5_lightning nemotron_3_nano nemotron_3_super nemotron_3_ultra": (OTHER_CUE, OTHER_CUE, OTHER_CUE),
    "nemotron_3_5_lightning_training nemotron_3_nano_training nemotron_3_super_training nemotron_3_ultra_training": (
        *says("<think></think>", "<|im_end|>", NO_TOOLS)[:2],
        [f"<think></think>\n{XML_CALL}\n<|im_end|>", "<think></think>Four.<|im_end|>"],
    ),
    "phi3 phi3_5 phi3_training phi3_5_training": says("", "<|end|>", NO_TOOLS),  # not the </s> behind the whole
    "qwen2_5 qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_vl qwen3_vl_training": says(
        "", "<|im_end|>", QWEN_CALL
    ),
    "qwen2_5_training": says("\n", "<|im_end|>", QWEN_CALL),  # the markers start before the line break
    "qwen2_5_vl qwen2_5_vl_training": says("", "<|im_end|>", NO_TOOLS),
    "qwen3": (OTHER_TURN, [f"{NO_THOUGHT}Four.<|im_end|>"], OTHER_TURN),
    "qwen3_training": says(NO_THOUGHT, "<|im_end|>", QWEN_CALL),
    "qwen3_5_nothink": (OTHER_CUE, *says("", "<|im_end|>", XML_CALL)[1:]),
    "qwen3_5_think qwen3_6": (OTHER_CUE, *says(AFTER_THOUGHT, "<|im_end|>", XML_CALL)[1:]),
    "qwen3_8": says(AFTER_THOUGHT, "<|im_end|>", XML_CALL),
    "qwen3_5_nothink_training qwen3_5_think_training qwen3_6_training qwen3_8_training": says(
        NO_THOUGHT, "<|im_end|>", XML_CALL
    ),
}
LISTED = {name: expected for names, expected in EXPECTED.items() for name in names.split()}
WANT_PARTS = ("idefics3", "smolvlm", "llava_next")  # content as a list of parts
ASKED = ("several answers", "system message", "tools")

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="trl, whose chat templates are the test data, is not installed")


@cache
def tokenizer_of(name):
    return tokenizer_for(TEMPLATES[name])


def rows_for(name):
    rows = [CASES[case] for case in ASKED]
    if not name.startswith(WANT_PARTS):
        return rows
    return [{**row, "messages": [in_parts(turn) for turn in row["messages"]]} for row in rows]


def in_parts(turn):
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def test_every_template_that_is_shipped_has_an_expectation():
    assert len(TEMPLATES) >= 60
    assert sorted(set(TEMPLATES) - set(LISTED)) == []


@pytest.mark.parametrize("name", sorted(set(LISTED) & set(TEMPLATES)))
def test_only_answers_and_their_end_tokens_are_targets_in_every_shipped_template(name):
    tokenizer = tokenizer_of(name)
    rows = rows_for(name)
    for row, outcome, expected in zip(rows, ConversationEncoder(tokenizer)(rows), LISTED[name], strict=True):
        if isinstance(expected, Refused):
            assert isinstance(outcome, DataError)
            assert expected.reason in str(outcome)
            continue
        assert targets(outcome, tokenizer) == expected
        whole = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=True, return_dict=False)
        ids = outcome.arrays["input_ids"].tolist()
        assert ids == whole or ids[:-1] == whole[: len(ids) - 1]  # ended with end-of-sequence
