"""A question that the answers repeat is read once, what resembles it is noted; a row's system message is first."""

import json

import pytest

from finetune.data.formats.columns import NOTES
from finetune.data.formats.conversations import OWN_PROMPT
from finetune.errors import DataError
from tests.data.formats.test_row_format import read
from tests.refusals import refused

ASKED = "What is two plus two?"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
PAIR = {"prompt": [user(ASKED)], "chosen": [assistant("Four.")], "rejected": [assistant("Five.")]}
EARLIER = [user(ASKED), assistant("Four."), user("And one more?")]


def pair(prompt, *before, **more):
    """Return a row whose answers are conversations that begin with these turns."""
    return {
        "prompt": prompt,
        "chosen": [*before, assistant("Four.")],
        "rejected": [*before, assistant("Five.")],
        **more,
    }


REPEATED = {
    "a text, and conversations": (pair(ASKED, user(ASKED)), PAIR),
    "turns, and conversations": (pair([user(ASKED)], user(ASKED)), PAIR),
    "answers alone": (pair(ASKED), PAIR),
    "only the chosen one repeats it": ({**pair(ASKED), "chosen": [user(ASKED), assistant("Four.")]}, PAIR),
    "a system message before it": (pair(ASKED, SYSTEM, user(ASKED)), {**PAIR, "prompt": [SYSTEM, user(ASKED)]}),
    "the first question of several": (pair(ASKED, *EARLIER), {**PAIR, "prompt": EARLIER}),
    "all questions of several": (pair(EARLIER, *EARLIER), {**PAIR, "prompt": EARLIER}),
    "texts": ({"prompt": ASKED, "chosen": f"{ASKED} Four.", "rejected": f"{ASKED}\n\nFive."}, PAIR),
    "the row's system message": (
        pair(ASKED, user(ASKED), system="Be brief."),
        {**PAIR, "prompt": [SYSTEM, user(ASKED)]},
    ),
    "the system message twice": (
        pair(ASKED, SYSTEM, user(ASKED), system="Be brief."),
        {**PAIR, "prompt": [SYSTEM, user(ASKED)]},
    ),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_prompt_that_both_answers_repeat_is_read_once(name):
    row, meant = REPEATED[name]
    assert read(row) == meant


@pytest.mark.parametrize("chosen", ["Hello there!", "Hello"])
def test_an_answer_may_begin_with_the_word_that_it_answers(chosen):
    row = read({"prompt": "Hello", "chosen": chosen, "rejected": "Hello, go away."})
    assert [row["chosen"][0]["content"], row["rejected"][0]["content"]] == [chosen, "Hello, go away."]


def test_texts_that_only_one_answer_repeats_are_not_touched():
    row = read({"prompt": ASKED, "chosen": f"{ASKED} Four.", "rejected": "Five."})
    assert row["chosen"] == [assistant(f"{ASKED} Four.")]
    assert row[NOTES] == (OWN_PROMPT,)


@pytest.mark.parametrize("form", ["prompt_completion", "judged"])
def test_a_completion_that_is_the_whole_conversation_has_the_prompt_once(form):
    row = {"prompt": ASKED, "completion": [user(ASKED), assistant("Four.")], "label": True}
    short = {**row, "completion": "Four."}
    assert read(row, format=form) == read(short, format=form)


NEARLY = {
    "other case and spaces": pair(ASKED, user("what is two  plus two?")),
    "another question": pair(ASKED, user("Who?")),
    "a text with other spaces": {"prompt": ASKED, "chosen": "What is two plus  two? 4", "rejected": "5"},
    "a completion": {"prompt": ASKED, "completion": f"{ASKED} Four."},
}


@pytest.mark.parametrize("name", NEARLY)
def test_an_answer_that_begins_with_a_question_of_its_own_is_noted(name):
    assert read(NEARLY[name])[NOTES] == (OWN_PROMPT,)


@pytest.mark.parametrize(
    "row", [pair(ASKED), {"prompt": ASKED, "completion": "Four."}, {"prompt": ASKED, "completion": ASKED}]
)
def test_ordinary_answers_are_not_noted(row):
    assert NOTES not in read(row)


SYSTEMS = {
    "messages": {"messages": [user("Hi."), assistant("Hello.")]},
    "conversations": {"conversations": [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]},
    "prompt_completion": {"prompt": "Hi.", "completion": "Hello."},
    "instruction": {"instruction": "Hi.", "output": "Hello."},
}


@pytest.mark.parametrize("form", SYSTEMS)
def test_the_rows_system_message_is_the_first_turn_in_every_format_of_turns(form):
    plain = [user("Hi."), assistant("Hello.")]
    assert read({**SYSTEMS[form], "system": "Be brief."}, format=form) == {"messages": [SYSTEM, *plain]}
    for absent in (None, ""):
        assert read({**SYSTEMS[form], "system": absent}, format=form) == {"messages": plain}


def test_two_different_system_messages_are_refused():
    row = {"messages": [SYSTEM, user("Hi."), assistant("Hello.")]}
    assert read({**row, "system": "Be brief."}) == row
    with refused(DataError, "row 1", "`system`"):
        read({**row, "system": "Be long."})


CALLS = [{"name": "weather", "arguments": {"city": "Rome"}}]


def test_a_template_of_an_answer_may_render_turns_as_json():
    row = {"query": "Rome?", "answers": json.dumps(CALLS)}
    template = {
        "prompt": "{{ query }}",
        "completion": "{{ [{'role': 'assistant', 'tool_calls': answers | fromjson}] | tojson }}",
    }
    question, answer = read(row, template=template)["messages"]
    assert (question, answer["tool_calls"], answer["content"]) == (user("Rome?"), CALLS, None)


@pytest.mark.parametrize("text", ["[1, 2]", '[{"name": "f"}]', "[math] x", '{"value": 3}', '{"content": 3}', "[", "{"])
def test_other_text_that_a_template_renders_stays_text(text):
    row = read({"a": text}, template={"prompt": "{{ a }}", "completion": "{{ a }}"})
    assert [turn["content"] for turn in row["messages"]] == [text, text]


TEMPLATES = {
    "the better of two": (
        {"history": "Q", "human_ref_A": "a", "human_ref_B": "b", "labels": 0},
        {
            "prompt": "{{ history }}",
            "chosen": "{{ human_ref_A if labels == 1 else human_ref_B }}",
            "rejected": "{{ human_ref_B if labels == 1 else human_ref_A }}",
        },
        {"prompt": [user("Q")], "chosen": [assistant("b")], "rejected": [assistant("a")]},
    ),
    "the best and the worst of ranked ones": (
        {
            "q": "Q",
            "answers": [{"answer": "b", "rank": 2.0}, {"answer": "a", "rank": 1.0}, {"answer": "c", "rank": 3.0}],
        },
        {
            "prompt": "{{ q }}",
            "chosen": "{{ (answers | sort(attribute='rank') | first).answer }}",
            "rejected": "{{ (answers | sort(attribute='rank') | last).answer }}",
        },
        {"prompt": [user("Q")], "chosen": [assistant("a")], "rejected": [assistant("c")]},
    ),
    "the first of several answers": (
        {"q": "Q", "answers": {"text": ["a"], "answer_start": [3]}},
        {"prompt": "{{ q }}", "completion": "{{ answers.text[0] if answers.text else 'unanswerable' }}"},
        {"messages": [user("Q"), assistant("a")]},
    ),
    "none of no answers": (
        {"q": "Q", "answers": {"text": [], "answer_start": []}},
        {"prompt": "{{ q }}", "completion": "{{ answers.text[0] if answers.text else 'unanswerable' }}"},
        {"messages": [user("Q"), assistant("unanswerable")]},
    ),
    "a choice by its index": (
        {"q": "Q", "choices": ["a", "b"], "answer": 1},
        {"prompt": "{{ q }}", "completion": "{{ choices[answer] }}"},
        {"messages": [user("Q"), assistant("b")]},
    ),
    "the selected passage, and the others": (
        {"query": "Q", "passages": {"is_selected": [0, 1, 0], "passage_text": ["a", "b", "c"]}},
        {
            "positive": "{{ passages.passage_text[passages.is_selected.index(1)] }}",
            "negatives": "{% set others = namespace(texts=[]) %}{% for text in passages.passage_text %}"
            "{% if not passages.is_selected[loop.index0] %}{% set others.texts = others.texts + [text] %}{% endif %}"
            "{% endfor %}{{ others.texts | tojson }}",
        },
        {"anchor": "Q", "positive": "b", "negatives": ["a", "c"]},
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_choose_among_the_answers_of_a_row(name):
    row, template, meant = TEMPLATES[name]
    assert read(row, template=template) == meant
