"""Which turns are targets, where each begins and ends, and which conversations are refused as ambiguous."""

import pytest

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.templates.chat_template import BUILT_IN
from finetune.errors import DataError
from tests.data.template_tokenizers import shipped_templates, targets, tokenizer_for
from tests.small_models import byte_tokenizer

CHATML = BUILT_IN["chatml"].read_text(encoding="utf-8")
QWEN = BUILT_IN["qwen"].read_text(encoding="utf-8")
END = "<|im_end|>"


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


ASKED, ANSWERED = turn("user", "Two and two?"), turn("assistant", "Four.")
AGAIN, AGAIN_ANSWERED = turn("user", "And three?"), turn("assistant", "Six.")
TALK = [ASKED, ANSWERED, AGAIN, AGAIN_ANSWERED]
MARKED = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|bot|>"
    "{% generation %}{{ m.content }}{% endgeneration %}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
"""Its markers leave the end of turn out."""


def outcome(turns, template=CHATML, *, tools=None, tokenizer=None, **keys):
    return ConversationEncoder(tokenizer or tokenizer_for(template), **keys)([{"messages": turns, "tools": tools}])[0]


def target_texts(turns, template=CHATML, **keys):
    """Return the targets as text, one character being one token."""
    tokenizer = tokenizer_for(template)
    found = outcome(turns, tokenizer=tokenizer, **keys)
    assert not isinstance(found, DataError), found
    return targets(found, tokenizer)


def refused(turns, template=CHATML, **keys):
    found = outcome(turns, template, **keys)
    assert isinstance(found, DataError), found
    return str(found)


@pytest.mark.parametrize("template", [CHATML, QWEN])
def test_train_on_selects_all_answers_the_last_answer_or_everything(template):
    assert target_texts(TALK, template) == [f"Four.{END}", f"Six.{END}"]
    assert target_texts(TALK, template, train_on="last_assistant") == [f"Six.{END}"]
    (everything,) = target_texts(TALK, template, train_on="all")
    assert everything == f"user\nTwo and two?{END}\n<|im_start|>assistant\nFour.{END}\n" + (
        f"<|im_start|>user\nAnd three?{END}\n<|im_start|>assistant\nSix.{END}"
    )


@pytest.mark.parametrize("template", [CHATML, QWEN])
def test_the_weight_of_each_message_selects_its_targets(template):
    talk = [turn("user", "Two?", weight=1), turn("assistant", "Four.", weight=0), AGAIN, AGAIN_ANSWERED]
    said = target_texts(talk, template, train_on="per_message")
    assert said == [f"user\nTwo?{END}", f"Six.{END}"]  # the first token is not predicted
    talk = [ASKED, ANSWERED, turn("user", "And three?", weight=1.0), turn("assistant", "Six.", weight=1)]
    assert target_texts(talk, template, train_on="per_message") == [
        f"Four.{END}",
        f"<|im_start|>user\nAnd three?{END}",
        f"Six.{END}",
    ]
    nothing = [ASKED, turn("assistant", "Four.", weight=0)]
    assert outcome(nothing, template, train_on="per_message") is None


def test_a_weight_that_would_be_ignored_is_refused():
    weighted = [ASKED, turn("assistant", "Four.", weight=1)]
    for train_on in ("assistant", "last_assistant", "all"):
        assert f"turn 2 has a `weight`, which `data.train_on: {train_on}` does not read" in refused(
            weighted, train_on=train_on
        )
    half = [ASKED, turn("assistant", "Four.", weight=0.5)]
    assert "turn 2 has `weight` 0.5: it must be 1 or 0" in refused(half, train_on="per_message")


OUT_OF_THE_LOSS = [
    *(
        {name: 0}
        for name in ("weight", "loss", "loss_weight", "loss_mask", "loss_scale", "train", "trainable", "learn")
    ),
    *({name: False} for name in ("training", "should_train", "Train")),
    *({name: True} for name in ("masked", "is_masked", "ignore_loss")),
]


@pytest.mark.parametrize("key", OUT_OF_THE_LOSS, ids=str)
def test_any_word_for_out_of_the_loss_is_honored_where_turns_choose_and_refused_elsewhere(key):
    talk = [ASKED, turn("assistant", "Four.", **key), AGAIN, turn("assistant", "Six.", **dict.fromkeys(key))]
    assert target_texts(talk, QWEN, train_on="per_message") == [f"Six.{END}"]
    ((name, value),) = key.items()
    answered = [ASKED, turn("assistant", "Four.", **{name: not value})]
    assert target_texts(answered, QWEN, train_on="per_message") == [f"Four.{END}"]
    message = refused(talk, QWEN)
    assert f"turn 2 has a `{name}`, which `data.train_on: assistant` does not read" in message
    assert "data.train_on: per_message" in message


def test_words_whose_meaning_differs_or_that_contradict_each_other_are_refused():
    for train_on in ("assistant", "per_message"):
        masked = [ASKED, turn("assistant", "Four.", mask=1)]
        assert "turn 2 has `mask`, whose meaning differs between tools" in refused(masked, train_on=train_on)
    both = [ASKED, turn("assistant", "Four.", weight=1, masked=True)]
    assert "turn 2 has `weight` and `masked`, which contradict" in refused(both, train_on="per_message")
    agreed = [ASKED, turn("assistant", "Four.", weight=1, masked=False)]
    assert target_texts(agreed, train_on="per_message") == [f"Four.{END}"]
    logged = [ASKED, turn("assistant", "Four.", loss="1.25")]
    assert "turn 2 has `loss` '1.25': it must be 1 or 0" in refused(logged, train_on="per_message")


def num_empty(turns, template=QWEN, **keys):
    found = outcome(turns, template, **keys)
    return found if isinstance(found, DataError) else found.findings.empty_answers


def test_answers_of_which_only_the_end_of_the_turn_is_a_target_are_counted():
    empty = turn("assistant", "")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert num_empty([ASKED, ANSWERED]) == 0
    assert num_empty([ASKED, turn("assistant", None, tool_calls=[call])]) == 0
    for template in (QWEN, CHATML, MARKED):
        assert num_empty([ASKED, empty, AGAIN, AGAIN_ANSWERED, AGAIN, turn("assistant", " \n")], template) == 2
    thought = turn("assistant", "", reasoning_content="It is Rome.")
    assert num_empty([ASKED, thought]) == 0
    assert num_empty([ASKED, thought], train_on_reasoning=False) == 1
    assert num_empty([turn("user", "", weight=1), ANSWERED], train_on="per_message") == 0
    without = QWEN.replace("message['content'] or ''", "''")  # a template that drops the content
    assert "drops the content of `assistant` turns" in str(num_empty([ASKED, ANSWERED], without))


def test_training_on_the_last_answer_does_not_render_later_turns():
    found = outcome([*TALK, turn("user", "Bye.")], train_on="last_assistant")
    tokenizer = tokenizer_for(CHATML)
    assert tokenizer.decode(found.arrays["input_ids"].tolist()).endswith(f"Six.{END}\n")


@pytest.mark.skipif(not shipped_templates(), reason="trl, whose chat templates are the test data, is not installed")
def test_the_last_answer_is_a_target_with_a_template_that_rewrites_earlier_turns():
    said = refused(TALK, shipped_templates()["qwen3"])
    assert "(the tokenizer's own) renders turn 2 differently when the conversation stops there " in said
    assert "stops there ('...tart|>assist" in said
    assert "and when it continues ('...tart|>assistant\\nFour.<|im_end|>" in said
    assert "Set data.train_on: each_assistant, which makes each answer a sample of its own" in said
    assert "`_training` variants" in said
    assert target_texts(TALK, shipped_templates()["qwen3"], train_on="last_assistant") == [
        f"<think>\n\n</think>\n\nSix.{END}"
    ]


@pytest.mark.skipif(not shipped_templates(), reason="trl, whose chat templates are the test data, is not installed")
def test_a_prompt_that_training_does_not_begin_with_has_another_remedy():
    said = refused(TALK[:2], shipped_templates()["nemotron_3_nano"])
    assert "The prompt at inference would differ from training" in said
    assert "Set data.train_on" not in said
    thinking = [ASKED, turn("assistant", "Four.", reasoning_content="Two twos.")]
    said = target_texts(thinking, shipped_templates()["nemotron_3_nano"])
    assert said == ["Two twos.\n</think>\nFour.<|im_end|>"]


def test_an_end_of_turn_after_the_marker_is_a_target_and_whitespace_is_not():
    assert target_texts(TALK, MARKED) == ["Four.<|end|>", "Six.<|end|>"]
    inside = MARKED.replace("{% endgeneration %}<|end|>\n", "<|end|>\n{% endgeneration %}")
    assert target_texts(TALK, inside) == ["Four.<|end|>", "Six.<|end|>"]
    spaced = MARKED.replace("{% endgeneration %}<|end|>", "{% endgeneration %}{{ '\n' }}<|end|>")
    assert target_texts(TALK, spaced) == ["Four.\n<|end|>", "Six.\n<|end|>"]


def test_a_marker_without_any_end_of_turn_is_ended_with_end_of_sequence():
    open_ended = MARKED.replace("<|end|>\n", "")
    assert target_texts([ASKED, ANSWERED], open_ended) == ["Four.</s>"]


def test_every_marked_span_is_a_target_and_the_last_answer_is_found_by_its_own_span():
    twice = MARKED.replace("{{ m.content }}{% endgen", "{{ m.content }}{% endgeneration %}{% generation %}!{% endgen")
    assert target_texts(TALK, twice) == ["Four.!<|end|>", "Six.!<|end|>"]
    assert target_texts(TALK, twice, train_on="last_assistant") == ["Six.!<|end|>"]


PLAIN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""Writes nothing between a prompt and its answer."""


@pytest.mark.parametrize(
    ("asked", "answered", "cure"),
    [
        ("Two and two? ", "is four", ("Two and two?", " is four")),
        ("Two?\n", "\n\nis", ("Two?", "\n\n\nis")),
        ("T", "wo and two", ("T", " wo and two")),
    ],
)
def test_a_token_across_a_boundary_is_reported_with_a_remedy_that_is_accepted(asked, answered, cure):
    tokenizer = byte_tokenizer(["Two is Two is a\n\n\nb\n\n\n"] * 9, special=["</s>"])
    tokenizer.chat_template = PLAIN
    said = refused([turn("user", asked), turn("assistant", answered)], tokenizer=tokenizer)
    assert "crosses the boundary of the text that the template marks" in said
    assert "move it to the start of the answer" in said
    prompt, answer = cure
    trained = outcome([turn("user", prompt), turn("assistant", answer)], tokenizer=tokenizer)
    assert targets(trained, tokenizer) == [f"{answer}</s>"]


WANTS_A_QUESTION = (
    "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query found.') }}{% endif %}"
) + CHATML


def test_a_template_that_refuses_a_beginning_of_a_conversation_is_reported_with_what_works():
    greeted = [turn("system", "Be kind."), turn("assistant", "Hello!"), ASKED, ANSWERED]
    for mode in ("assistant", "per_message"):
        said = refused(greeted, WANTS_A_QUESTION, train_on=mode)
        assert "refuses it when it stops after turn 1 (system): No user query found. Set data.train_on: last_" in said
    assert target_texts(greeted, WANTS_A_QUESTION, train_on="last_assistant") == [f"Four.{END}"]
    marked = WANTS_A_QUESTION.replace(CHATML, MARKED)
    assert target_texts(greeted[1:], marked, train_on="last_assistant") == ["Four.<|end|>"]
    assert "data.train_on" not in refused(greeted, WANTS_A_QUESTION, chooses_turns=False)


def test_a_template_that_refuses_the_whole_conversation_has_only_its_own_message():
    never = "{{ raise_exception('never') }}"
    for mode in ("assistant", "each_assistant", "last_assistant"):
        assert refused(TALK, never, train_on=mode).endswith("): never")


def test_two_beginnings_of_sequence_are_refused():
    said = refused([ASKED, ANSWERED], "{{ bos_token }}{{ bos_token }}" + CHATML)
    assert "the chat template writes <s> twice at the start" in said


def test_an_end_of_sequence_after_the_conversation_is_not_a_target():
    ends = CHATML.replace("{%- if add", "{%- if not add_generation_prompt -%}{{ eos_token }}{%- endif -%}{%- if add")
    assert target_texts(TALK, ends) == [f"Four.{END}", f"Six.{END}"]


def test_the_tools_and_calls_of_a_row_reach_the_template():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    talk = [ASKED, turn("assistant", None, tool_calls=[call]), turn("tool", "4"), ANSWERED]
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    assert target_texts(talk, QWEN, tools=tools) == [f"{called}{END}", f"Four.{END}"]
    thinking = [ASKED, turn("assistant", "Four.", reasoning_content="Twice two.")]
    assert target_texts(thinking, QWEN) == [f"<think>\nTwice two.\n</think>\n\nFour.{END}"]


def test_content_that_a_template_drops_is_reported():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert "drops the `tools` of the row: the model would not see them" in refused(TALK, tools=tools)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    calls = [ASKED, turn("assistant", "Let me see.", tool_calls=[call])]
    assert "drops `tool_calls` of assistant turns with content" in refused(calls)
    thinking = [ASKED, turn("assistant", "Four.", reasoning_content="Twice two.")]
    assert "drops the reasoning of the last turn" in refused(thinking)
    no_system = "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    assert "drops the content of `system` turns" in refused([turn("system", "Be brief."), *TALK], no_system)
    assert target_texts(TALK, no_system)[0].endswith("Four.</s>")


def test_a_content_that_the_template_cannot_write_is_named():
    parts = [turn("user", [{"type": "text", "text": "Two?"}]), ANSWERED]
    assert "refuses the conversation (user, assistant): can only concatenate str" in refused(parts)
    as_code = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    assert "writes the content of turn 1, a list of parts, as Python code" in refused(parts, as_code)
    wants_parts = "{% for m in messages %}<|{{ m.role }}|>{{ m.content[0].text }}</s>{% endfor %}"
    assert "or a list of parts" in refused(TALK, wants_parts)


def test_arguments_that_would_be_quoted_twice_are_named():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    quoting = QWEN.replace("function['arguments'] if function['arguments'] is string else ", "")
    talk = [ASKED, turn("assistant", "", tool_calls=[call])]
    assert "writes the arguments of the tool call in turn 2, which are text, in quotes" in refused(talk, quoting)
    assert target_texts(talk, QWEN) == [f'<tool_call>\n{{"name": "add", "arguments": {{"a": 2}}}}\n</tool_call>{END}']
