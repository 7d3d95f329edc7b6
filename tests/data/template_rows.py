"""Rows for chat templates: gsm8k in two exchanges, hh-rlhf's dialogues, calls of a calculator, and reasoning."""

import gzip
import json
import random
import re
from functools import cache
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AddedToken, PreTrainedTokenizerFast

from tests.data.template_tokenizers import BEGIN, END, MARK
from tests.small_models import trained_bytes

DATA = next(
    (each / "shared" / "data" for each in Path(__file__).parents if (each / "shared" / "data").is_dir()), Path("absent")
)
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


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def _made_up(num):
    chance = random.Random(0)
    for _ in range(num):
        who, what = chance.choice(("Anna", "Bela", "Clara", "David")), chance.choice(("apples", "books", "pens"))
        have, more = chance.randint(2, 900), chance.randint(2, 900)
        question = f"{who} has {have} {what} and buys {more} more. How many {what} does {who} have now?"
        steps = f"{who} has {have} + {more} = {have + more} {what}."
        yield question, steps, [(f"{have}+{more}", str(have + more))], str(have + more)


@cache
def gsm8k():
    """Return questions with their steps, the computed expressions, and the final number; made up where it is absent."""
    if not DATA.is_dir():
        return list(_made_up(7_000))
    found = []
    with (DATA / "gsm8k" / "train.jsonl").open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            steps, _, number = row["answer"].partition("\n#### ")
            computed = re.findall(r"<<([^=<>]+)=([^<>]+)>>", steps)
            found.append((row["question"], re.sub(r"<<[^<>]*>>", "", steps), computed, number))
    return found


def two_exchanges(num):
    rows = gsm8k()
    pairs = zip(rows[:num], rows[num : 2 * num], strict=True)
    return [
        {"messages": [user(a[0]), assistant(f"{a[1]}\n#### {a[3]}"), user(b[0]), assistant(f"{b[1]}\n#### {b[3]}")]}
        for a, b in pairs
    ]


def dialogues(num):
    """Return hh-rlhf's dialogues of two and more exchanges in which every turn says something."""
    found = []
    with gzip.open(DATA / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in file:
            parts = re.split(r"\n\n(Human|Assistant): ", json.loads(line)["chosen"])
            turns = [
                (user if who == "Human" else assistant)(text.strip())
                for who, text in zip(parts[1::2], parts[2::2], strict=True)
            ]
            roles = [turn["role"] for turn in turns]
            if (
                len(turns) >= 4
                and roles == ["user", "assistant"] * (len(turns) // 2)
                and all(turn["content"] for turn in turns)
            ):
                found.append({"messages": turns})
    return found[:num]


def with_reasoning(num, *, inline=False):
    """Return two exchanges whose answers are reasoned about, in a field or in the content."""

    def answer(steps, number):
        if inline:
            return assistant(f"<think>\n{steps}\n</think>\n\nIt is {number}.")
        return assistant(f"It is {number}.", reasoning_content=steps)

    rows = gsm8k()
    pairs = zip(rows[:num], rows[num : 2 * num], strict=True)
    return [{"messages": [user(a[0]), answer(a[1], a[3]), user(b[0]), answer(b[1], b[3])]} for a, b in pairs]


def with_tools(num, *, reasons=False):
    """Return a question, a call for each of its first two computations, their results, and the answer."""
    return list(islice((_called(*row, reasons=reasons) for row in gsm8k() if row[2]), num))


def _called(question, steps, computed, number, *, reasons):
    turns = [user(question)]
    for place, (expression, value) in enumerate(computed[:2]):
        name = f"call{place:05d}"
        function = {"name": "calculate", "arguments": {"expression": expression}}
        thought = {"reasoning_content": f"I compute {expression}."} if reasons else {}
        turns.append(assistant("", tool_calls=[{"id": name, "type": "function", "function": function}], **thought))
        turns.append({"role": "tool", "name": "calculate", "tool_call_id": name, "content": value})
    thought = {"reasoning_content": steps} if reasons else {}
    return {"messages": [*turns, assistant(f"It is {number}.", **thought)], "tools": [CALCULATOR]}


KINDS = {
    "two exchanges": two_exchanges,
    "dialogues": dialogues,
    "reasoning": with_reasoning,
    "inline reasoning": lambda num: with_reasoning(num, inline=True),
    "tools": with_tools,
    "tools and reasoning": lambda num: with_tools(num, reasons=True),
}


@cache
def _trained(marks):
    texts = (text for row in gsm8k()[:2000] for text in row[:2])
    return trained_bytes(texts, special=[BEGIN, END, *marks], size=2000 + len(marks)).to_str()


def trained_tokenizer(template):
    """Return a tokenizer trained on gsm8k with this template; marks of thoughts and calls are tokens, not special."""
    marks = sorted(set(MARK.findall(template)) - {BEGIN, END})
    special = [mark for mark in marks if not PLAIN_MARKS.match(mark)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tuple(special))), bos_token=BEGIN, eos_token=END
    )
    plain = [mark for mark in marks if mark not in special]
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in plain])
    made.chat_template = template
    return made
