"""What is found for a tokenizer and its chat template before anything is prepared."""

import json
from dataclasses import asdict

import pytest

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.template_check import CASES, check_template
from finetune.data.templates.chat_template import BUILT_IN
from tests.data.template_tokenizers import tokenizer_for

TEMPLATES = {name: path.read_text(encoding="utf-8") for name, path in BUILT_IN.items()}


def checked(template, **keys):
    """Return the check and its lines as one text."""
    section = DataSection(train=TrainingSourceSection(path="/nowhere.jsonl"), max_length=64, **keys)
    check = check_template(tokenizer_for(TEMPLATES.get(template, template)), section)
    assert json.loads(json.dumps(asdict(check)))["template"] == check.template
    return check, "\n".join(check.lines())


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_prompts_of_a_built_in_template_are_prefixes_of_training_texts(name):
    check, lines = checked(name)
    assert check.differences == ()
    assert check.trains_on_end
    assert len(check.end_of_turn_tokens) == 1
    assert {"one answer", "several answers", "system message"} <= set(check.trained_cases)
    assert set(check.trained_cases) | set(check.refused) == set(CASES)
    assert ("tools" in check.trained_cases) == (name == "qwen")
    assert "prompts at inference are prefixes of the training samples" in lines


def test_unsupported_template_features_are_reported_with_the_reason():
    check, lines = checked("chatml")
    assert check.targets_by == "renderings"
    assert "chat template of the tokenizer: its targets are located by rendering prefixes" in lines
    assert "  not trainable: tools: the chat template (the tokenizer's own) drops the `tools` of the row" in lines
    assert "  end of turn: '<|im_end|>', one token, a target" in lines
    assert checked("chatml", chat_template="chatml")[0].template == "`chatml`"


def test_a_prompt_that_differs_from_training_is_shown_as_text_and_tokens():
    check, lines = checked(
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|bot|>"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|bot|><think>{% endif %}"
    )
    assert [each.case for each in check.differences][:2] == ["one answer", "several answers"]
    assert check.differences[0].prompt_tokens[-2:] == ("<|bot|>", "<think>")
    assert check.differences[0].trained_tokens[1:4] == ("<|bot|>", "F", "o")
    assert "?<|bot|><think>' but the model was trained on '" in lines


def test_the_system_prompt_that_a_template_adds_is_reported():
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    added = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Ann.<|im_end|>\n{% endif %}"
    check, lines = checked(added + turns)
    assert check.default_system == "You are Ann." and lines.count("'You are Ann.'") == 1
    headed = (
        "<|im_start|>system\nToday is Monday.\n{% if messages[0].role != 'system' %}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}<|im_end|>\n{% else %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    assert checked(headed)[0].default_system == ""
    assert [name for name in TEMPLATES if checked(name)[0].default_system] == []


def test_a_template_that_wants_parts_gets_parts():
    check, lines = checked("{% for m in messages %}<|{{ m.role }}|>{{ m.content[0].text }}</s>{% endfor %}")
    assert 'content must be a list of parts: [{"type": "text", "text": "..."}]' in lines
    assert check.trains_on_end
