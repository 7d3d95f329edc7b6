"""Arguments of chat templates: a job's and a row's reach the template, and none that it never reads is passed."""

import json

import pytest
from transformers import AutoTokenizer

from finetune.config.section import KeyLocation
from finetune.data.encoding.conversation import ConversationEncoder, prompt_ids, read_prompt
from finetune.data.rows import RawRow
from finetune.data.templates.rendering import (
    arguments_of,
    own_arguments,
    readable_names,
    render_chat,
    set_template_arguments,
    use_arguments,
)
from finetune.errors import DataError
from tests.data.template_tokenizers import shipped_templates, tokenizer_for
from tests.refusals import refused

TEMPLATE = (
    "{% if mood is defined %}<|mood|>{{ mood }}{% endif %}{% if not brief %}<|long|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASKED, ANSWERED = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
ROW = {"messages": [ASKED, ANSWERED]}


@pytest.fixture
def tokenizer():
    return tokenizer_for(TEMPLATE)


def text(tokenizer, row=ROW):
    (outcome,) = ConversationEncoder(tokenizer)([row])
    if isinstance(outcome, DataError):
        return str(outcome)
    return tokenizer.decode(outcome.arrays["input_ids"].tolist())


def test_a_jobs_arguments_and_a_rows_own_reach_the_template(tokenizer):
    assert text(tokenizer) == "<|long|><|user|>Two and two?</s><|assistant|>Four.</s>"
    set_template_arguments(tokenizer, {"mood": "gay", "brief": True})
    assert text(tokenizer) == "<|mood|>gay<|user|>Two and two?</s><|assistant|>Four.</s>"
    own = {**ROW, "chat_template_kwargs": {"mood": "sad"}}
    assert text(tokenizer, own).startswith("<|mood|>sad<|user|>")
    (features,) = ConversationEncoder(tokenizer)([own])
    assert features.findings.flags == {"argument_rows"}
    whole = tokenizer.apply_chat_template(ROW["messages"], tokenize=True, return_dict=False, mood="sad", brief=True)
    assert features.arrays["input_ids"].tolist() == whole
    absent = {**ROW, "chat_template_kwargs": {"mood": None, "custom_instructions": ""}}
    assert text(tokenizer, absent) == text(tokenizer)
    set_template_arguments(tokenizer, {})
    (features,) = ConversationEncoder(tokenizer)([own])
    assert features.findings.flags == {"argument_rows"}


def test_a_prompt_is_rendered_with_the_same_arguments(tokenizer):
    set_template_arguments(tokenizer, {"mood": "gay", "brief": True})
    for own in ({}, {"chat_template_kwargs": {"mood": "sad"}}, {"chat_template_kwargs": '{"mood": "sad"}'}):
        prompt = read_prompt(RawRow("rows.jsonl", 1, {**ROW, **own}))
        mood = "sad" if own else "gay"
        assert tokenizer.decode(prompt_ids(tokenizer, prompt)) == f"<|mood|>{mood}<|user|>Two and two?</s><|assistant|>"


def test_an_argument_that_the_template_never_reads_is_an_error_with_key_and_line(tokenizer):
    locations = {"data.chat_template_arguments.moood": KeyLocation("job.yaml", 7)}
    with refused(DataError, "line 7, data.chat_template_arguments.moood: ", "`brief`, `mood`", "arguments.tools: "):
        use_arguments(tokenizer, {"moood": "sad", "brief": True, "tools": []}, locations)
    assert arguments_of(tokenizer) == {}


def test_a_rows_argument_that_the_template_never_reads_is_an_error_of_the_row(tokenizer):
    refused = text(tokenizer, {**ROW, "chat_template_kwargs": {"enable_thinking": False}})
    assert refused.startswith("`chat_template_kwargs`: enable_thinking: the chat template does not read it. It reads")
    assert "ignore the column with `template: {chat_template_kwargs: '{}'}`" in refused


def test_in_a_table_absent_arguments_are_null_and_those_that_nothing_reads_may_be_empty():
    given = {"mood": None, "brief": False, "python_tools": [], "custom_instructions": "", "xml_tools": None}
    assert own_arguments(given, frozenset(("mood", "brief"))) == {"brief": False}


def test_names_of_control_tokens_in_a_rows_arguments_are_text(tokenizer):
    (features,) = ConversationEncoder(tokenizer)([{**ROW, "chat_template_kwargs": {"mood": "</s>"}}])
    ids = features.arrays["input_ids"].tolist()
    assert "control_rows" in features.findings.flags
    assert ids.count(tokenizer.eos_token_id) == 2  # of the turns
    assert tokenizer.decode(ids).startswith("<|mood|></s><|long|><|user|>Two")


def test_template_arguments_are_saved_and_loaded_with_the_tokenizer(tokenizer, tmp_path):
    set_template_arguments(tokenizer, {"mood": "sad", "brief": True})
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template_arguments"] == {
        "mood": "sad",
        "brief": True,
    }
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert text(loaded) == text(tokenizer)
    use_arguments(loaded, None)
    assert arguments_of(loaded) == {"mood": "sad", "brief": True}
    use_arguments(loaded, {})
    assert arguments_of(loaded) == {}


def test_variables_of_an_endless_template_are_found_in_a_process_of_its_own():
    endless = tokenizer_for("{{ 'a' * 10**12 }}{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    assert readable_names(endless) == {"mood"}
    with refused(DataError):
        render_chat(endless, [ASKED], arguments={"mood": "sad"})


READ = {
    "qwen3": "enable_thinking",
    "qwen3_6": "enable_thinking preserve_thinking add_vision_id",
    "gptoss": "reasoning_effort model_identity builtin_tools",
    "glm4moe": "enable_thinking",
    "gemma4_v5": "enable_thinking preserve_thinking",
    "llama3_1": "date_string custom_tools builtin_tools tools_in_user_message",
    "nemotron_3_super": "enable_thinking low_effort truncate_history_thinking",
}


@pytest.mark.skipif(not shipped_templates(), reason="trl, whose chat templates are the test data, is not installed")
def test_variables_read_by_templates_of_models_are_found():
    templates = shipped_templates()
    for name, arguments in READ.items():
        assert set(arguments.split()) <= readable_names(tokenizer_for(templates[name])), name
    for name in ("gemma3", "llama3", "phi3", "qwen2_5", "cohere2"):
        assert "enable_thinking" not in readable_names(tokenizer_for(templates[name]))
