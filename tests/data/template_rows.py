"""A calculator among tools, and tokenizers for the chat templates of real models."""

import random
import re
from functools import cache

from tokenizers import Tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.data.template_tokenizers import BEGIN, END, MARK
from tests.small_models import trained_bytes

PLAIN_MARKS = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value|parameter|function|tools)\b")
"""Marks that Qwen, GLM and DeepSeek add to their vocabulary without making them special."""

PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "What to compute."}},
    "required": ["expression"],
}
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculate", "description": "Computes an expression.", "parameters": PARAMETERS},
}


def _questions(num):
    """Yield questions and their answers."""
    chance = random.Random(0)
    for _ in range(num):
        who, what = chance.choice(("Anna", "Bela", "Clara", "David")), chance.choice(("apples", "books", "pens"))
        have, more = chance.randint(2, 900), chance.randint(2, 900)
        yield f"{who} has {have} {what} and buys {more} more. How many {what} does {who} have now?"
        yield f"{who} has {have} + {more} = {have + more} {what}."


@cache
def _trained(marks):
    return trained_bytes(_questions(2000), special=[BEGIN, END, *marks], size=2000 + len(marks)).to_str()


def trained_tokenizer(template):
    """Return a tokenizer with this template; marks of thoughts and calls are tokens, not special."""
    marks = sorted(set(MARK.findall(template)) - {BEGIN, END})
    special = [mark for mark in marks if not PLAIN_MARKS.match(mark)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tuple(special))), bos_token=BEGIN, eos_token=END
    )
    plain = [mark for mark in marks if mark not in special]
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in plain])
    made.chat_template = template
    return made
