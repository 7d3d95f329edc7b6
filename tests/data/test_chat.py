"""Setting a chat template."""

import pytest

from finetune.data.chat import require_chat_template, set_chat_template
from finetune.errors import DataError


def test_without_a_template_the_remedy_is_named(make_tokenizer):
    with pytest.raises(DataError, match=r"has no chat template.*data\.chat_template: chatml"):
        require_chat_template(make_tokenizer())


def test_the_tokenizer_keeps_its_own_template_when_none_is_set(tokenizer):
    own = tokenizer.chat_template
    set_chat_template(tokenizer, None)
    assert tokenizer.chat_template == own
    require_chat_template(tokenizer)


def test_a_file_is_taken_as_it_is(tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}", encoding="utf-8")
    set_chat_template(tokenizer, str(file))
    assert tokenizer.chat_template == "{{ messages[0].content }}"


def test_a_file_that_is_not_there_is_named(tokenizer):
    with pytest.raises(DataError, match=r"/nowhere/own\.jinja cannot be read.*chatml"):
        set_chat_template(tokenizer, "/nowhere/own.jinja")


def test_a_file_that_is_not_jinja_is_named_with_its_line(tokenizer, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("\n{% for %}", encoding="utf-8")
    with pytest.raises(DataError, match=r"own\.jinja, line 2: not valid Jinja"):
        set_chat_template(tokenizer, str(file))
