"""Templates of current models against transformers' own rendering: ids, prompts and masks on gsm8k and hh-rlhf.

Templates are those of the installed `trl`; `pytest -m slow -s` takes 1,000 rows for each and prints the table.
"""

from collections import Counter

import pytest

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.templates.rendering import set_template_arguments
from finetune.errors import DataError
from tests.data.template_rows import DATA, KINDS, trained_tokenizer
from tests.data.template_tokenizers import shipped_templates, targets

TEMPLATES = shipped_templates()
MODES = ("assistant", "last_assistant", "each_assistant")
SHARES = {"two exchanges": 0.3, "dialogues": 0.3}
"""Of the rows of a template; of each other kind a tenth."""

WITHOUT_THOUGHTS = {"reasoning", "tools and reasoning"}
WITHOUT_TOOLS = {"tools", "tools and reasoning"}
CONTRARY = {"reasoning", "inline reasoning", "tools and reasoning"}
"""Rows with reasoning, where the prompt says that there is none."""

# from template and arguments to the kinds that `each_assistant` refuses
REFUSED = {
    ("qwen3", ()): set(),
    ("qwen3", (("enable_thinking", False),)): CONTRARY,
    ("qwen3_training", ()): set(),
    ("qwen3_5_think", ()): set(),
    ("qwen3_5_nothink", ()): CONTRARY,
    ("qwen3_5_nothink", (("enable_thinking", True),)): set(),
    ("glm4moe", ()): set(),
    ("glm4moe", (("enable_thinking", False),)): CONTRARY,
    ("gptoss", ()): set(),
    ("gptoss", (("reasoning_effort", "high"),)): set(),
    ("deepseek_r1_distill", ()): set(KINDS),  # asked with <think>, rendered without
    ("gemma3", ()): WITHOUT_THOUGHTS | WITHOUT_TOOLS,
    ("gemma4_v5", ()): set(),
    ("gemma4_v5", (("enable_thinking", True),)): {"tools"},  # behind a result it asks for a thought
    ("llama3_1", ()): WITHOUT_THOUGHTS,
}
shipped = pytest.mark.skipif(not TEMPLATES, reason="trl, whose chat templates are the test data, is not installed")
with_data = pytest.mark.skipif(not DATA.is_dir(), reason="gsm8k and hh-rlhf are not there")


def rendered(tokenizer, row, turns, *, asks, arguments):
    return tokenizer.apply_chat_template(
        turns, tools=row.get("tools"), add_generation_prompt=asks, tokenize=True, return_dict=False, **arguments
    )


def check(tokenizer, row, outcome, *, mode, arguments):
    """Assert that ids are transformers' own, and that the targets are the answers and nothing else."""
    turns = row["messages"]
    places = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    chosen = places if mode == "each_assistant" else places[-1:]
    parts = outcome if mode == "each_assistant" else (outcome,)
    for place, features in zip(chosen, parts, strict=True):
        ids, shown = features.arrays["input_ids"].tolist(), turns[: place + 1]
        whole = rendered(tokenizer, row, shown, asks=False, arguments=arguments)
        prompt = rendered(tokenizer, row, turns[:place], asks=True, arguments=arguments)
        if mode != "assistant":
            assert ids[: len(prompt)] == prompt
            assert mode != "each_assistant" or not features.arrays["is_target"][: len(prompt)].any()
        if mode != "each_assistant" or whole[: len(prompt)] == prompt:  # else the answer changes its prompt
            assert ids == whole or ids[:-1] == whole[: len(ids) - 1]  # ended with end-of-sequence
        answers = [turns[each] for each in (places if mode == "assistant" else (place,))]
        for stretch, answer in zip(targets(features, tokenizer), answers, strict=True):
            assert answer["content"].split("</think>")[-1].strip() in stretch
            assert not any(call["function"]["name"] not in stretch for call in answer.get("tool_calls") or ())
            asked = [turn["content"] for turn in shown if turn["role"] == "user" and len(turn["content"]) > 40]
            assert not any(text in stretch for text in asked if text not in answer["content"])


def compare(name, arguments, *, num_rows):
    """Return by kind and mode how many rows are equal, and the first reason why others are refused."""
    tokenizer, found = trained_tokenizer(TEMPLATES[name]), {}
    set_template_arguments(tokenizer, arguments)
    for kind, rows_of in KINDS.items():
        rows = rows_of(max(2, round(num_rows * SHARES.get(kind, 0.1))))
        for mode in MODES:
            outcomes = ConversationEncoder(tokenizer, train_on=mode)(rows)
            refused = [str(each) for each in outcomes if isinstance(each, DataError)]
            for row, outcome in zip(rows, outcomes, strict=True):
                if not isinstance(outcome, DataError):
                    check(tokenizer, row, outcome, mode=mode, arguments=arguments)
            found[kind, mode] = (len(rows) - len(refused), len(rows), Counter(refused).most_common(1))
    return found


@shipped
@with_data
@pytest.mark.full
@pytest.mark.parametrize("case", REFUSED, ids=lambda case: " ".join([case[0], *(f"{a}={b}" for a, b in case[1])]))
def test_ids_are_transformers_own_and_targets_the_answers(case):
    name, arguments = case
    found = compare(name, dict(arguments), num_rows=6)
    refused = {kind for kind in KINDS if found[kind, "each_assistant"][2]}
    assert refused == REFUSED[case]
    assert all(equal > 0 for (kind, mode), (equal, *_) in found.items() if mode == MODES[2] and kind not in refused)
