"""Setting a chat template."""

import os

import pytest

from finetune.config.rules.data import BUILT_IN_TEMPLATES
from finetune.data.templates import row_template
from finetune.data.templates.chat_template import (
    BUILT_IN,
    MAX_TEMPLATE_BYTES,
    NEEDED,
    end_of_turn,
    require_chat_template,
    set_chat_template,
    stop_ids,
)
from finetune.data.templates.rendering import ConversationRefused, render_chat
from finetune.errors import DataError
from tests.refusals import refused


def test_a_tokenizer_without_a_chat_template_is_rejected_with_the_setting_to_write(make_tokenizer):
    with refused(DataError, "data.chat_template"):
        require_chat_template(make_tokenizer())


def test_the_tokenizer_keeps_its_own_template_when_none_is_set(tokenizer):
    own = tokenizer.chat_template
    set_chat_template(tokenizer, None)
    assert tokenizer.chat_template == own
    require_chat_template(tokenizer)


def test_a_chat_template_file_is_used_unchanged(tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    set_chat_template(tokenizer, str(file))
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_a_file_that_is_not_there_is_named(tokenizer):
    with refused(DataError, "/nowhere/own.jinja"):
        set_chat_template(tokenizer, "/nowhere/own.jinja")


def test_a_file_that_is_not_jinja_is_named_with_its_line(tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("\n{% for %}", encoding="utf-8")
    with refused(DataError, "own.jinja, line 2"):
        set_chat_template(tokenizer, str(file))


def test_a_file_that_is_not_a_template_is_rejected_unread(tokenizer, tmp_path):
    large, fifo = tmp_path / "large.jinja", tmp_path / "fifo.jinja"
    large.write_text("a" * (MAX_TEMPLATE_BYTES + 1))
    os.mkfifo(fifo)
    for file in (large, fifo):
        with refused(DataError, file.name):
            set_chat_template(tokenizer, str(file))


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append('more') }}",
        "{% include '/etc/passwd' %}",
        "{% for a in range(10**9) %}{% endfor %}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% for a in [1] %}" * 40 + "{% endfor %}" * 40,
        "{{ 1 / 0 }}",
    ],
)
def test_a_chat_template_reaches_nothing_but_the_conversation(tokenizer, template):
    tokenizer.chat_template = template
    depends_on_stack = "macro" in template or "((((" in template
    with refused(ConversationRefused, "(user)", varies=depends_on_stack) as caught:
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert caught.value.num_turns == 1


def test_a_chat_template_that_writes_too_much_is_named(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(row_template, "MAX_CHARACTERS", 99)
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content * 99 }}")
    set_chat_template(tokenizer, str(file))
    with refused(DataError, "own.jinja", "198 characters", "99"):
        render_chat(tokenizer, [{"role": "user", "content": "ab"}])
    file.write_text("{{ messages[0].content * 100 }}")
    with refused(DataError, "data.chat_template", "own.jinja", "100 characters"):
        set_chat_template(tokenizer, str(file))


def test_every_template_name_of_the_config_has_a_template_and_required_tokens():
    assert sorted(BUILT_IN) == sorted(BUILT_IN_TEMPLATES) == sorted(NEEDED)


def test_a_named_template_whose_tokens_the_tokenizer_does_not_know_is_refused_with_the_list(make_tokenizer):
    tokenizer = make_tokenizer(special=["<|endoftext|>", "<|eot_id|>"])
    with refused(DataError, "llama3", "<|start_header_id|>, <|end_header_id|>", "`chatml`"):
        set_chat_template(tokenizer, "llama3")
    assert tokenizer.chat_template is None
    for name in ("chatml", "zephyr"):  # plain text will do
        set_chat_template(tokenizer, name)


def test_the_stop_token_is_found_by_rendering_a_turn(tokenizer):
    assert end_of_turn(tokenizer).text == "<|im_end|>"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    assert (end_of_turn(tokenizer).text, end_of_turn(tokenizer).tokens) == ("", ())
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id}
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id}
