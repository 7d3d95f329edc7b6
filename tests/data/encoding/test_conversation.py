"""The targets of a conversation or a text, token by token."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.encoding.conversation import ConversationEncoder, prompt_ids, read_prompt, with_system_prompt
from finetune.data.encoding.text import TextEncoder
from finetune.data.encoding.tokenizer import drops_unknown_text, tokenizer_identity
from finetune.data.rows import RawRow
from finetune.data.templates.chat_template import set_chat_template, stop_ids, tokenize
from finetune.errors import DataError, RegistryError
from finetune.registry.turns import ROLES, RoleEntry
from tests.data.template_tokenizers import targets
from tests.refusals import refused


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def encode_turns(turns, tokenizer, tools=None, **keys):
    """Return what is made of one conversation, or raise what is wrong with it."""
    (outcome,) = ConversationEncoder(tokenizer, **keys)([{"messages": turns, "tools": tools}])
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


def encode_text(text, tokenizer):
    """Return what is made of one text, or raise what is wrong with it."""
    (outcome,) = TextEncoder(tokenizer)([{"text": text}])
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


ASKED = turn("user", "What is two and two?")
ANSWERED = turn("assistant", "Two and two is four.")


def test_encoded_tokens_equal_those_of_the_rendered_conversation(tokenizer):
    features = encode_turns([turn("system", "Be brief."), ASKED, ANSWERED], tokenizer)
    assert tokenizer.decode(features.arrays["input_ids"].tolist()) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is two and two?<|im_end|>\n"
        "<|im_start|>assistant\nTwo and two is four.<|im_end|>\n"
    )
    assert targets(features, tokenizer) == ["Two and two is four.<|im_end|>"]


def test_assistant_turns_in_a_prompt_are_context_and_not_targets(tokenizer):
    row = {"messages": [ASKED, ANSWERED, ASKED, turn("assistant", "Four.")], "num_context_turns": 3}
    for system_prompt in (None, "Be brief."):
        (features,) = ConversationEncoder(tokenizer, system_prompt=system_prompt)([row])
        assert targets(features, tokenizer) == ["Four.<|im_end|>"]


def test_a_last_user_turn_is_encoded_and_not_a_target(tokenizer):
    features = encode_turns([ASKED, ANSWERED, turn("user", "Hello")], tokenizer)
    assert targets(features, tokenizer) == ["Two and two is four.<|im_end|>"]
    assert tokenizer.decode(features.arrays["input_ids"].tolist()).endswith("<|im_start|>user\nHello<|im_end|>\n")


def test_a_template_without_end_of_turn_gets_end_of_sequence_as_a_target(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    features = encode_turns([ASKED, ANSWERED], tokenizer)
    assert targets(features, tokenizer) == [" Two and two is four.\n<|endoftext|>"]


def test_an_end_of_turn_of_several_tokens_is_followed_by_end_of_sequence(make_tokenizer):
    tokenizer = make_tokenizer(special=["<|endoftext|>"])
    set_chat_template(tokenizer, "chatml")
    features = encode_turns([ASKED, ANSWERED], tokenizer)
    assert targets(features, tokenizer) == ["Two and two is four.<|im_end|><|endoftext|>"]
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id}


def test_a_template_that_ends_a_turn_with_end_of_sequence_gets_no_second_one(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    features = encode_turns([ASKED, ANSWERED], tokenizer)
    assert targets(features, tokenizer) == ["Two and two is four.<|endoftext|>"]


def test_the_template_writes_the_only_beginning_of_sequence(make_tokenizer):
    tokenizer = make_tokenizer(special=["<|endoftext|>", "<s>", "<|end|>"], bos_token="<s>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    ids = encode_turns([ASKED, ANSWERED], tokenizer).arrays["input_ids"].tolist()
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


def test_a_template_that_rewrites_earlier_turns_is_rejected(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }}{{ m.content }}<|im_end|>{% endfor %}"
    with refused(DataError, "turn 2", "1What", "2What", "`chatml`"):
        encode_turns([ASKED, ANSWERED], tokenizer)


def test_a_token_across_the_edge_of_the_prompt_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% if m.role == 'user' %}T{% endif %}{% endfor %}"
    )
    assert len(tokenize(tokenizer, "Two")) < len(tokenize(tokenizer, "T")) + len(tokenize(tokenizer, "wo"))
    with refused(DataError, "turn 2", "'wo and two i'"):
        encode_turns([ASKED, turn("assistant", "wo and two is four.")], tokenizer)


def test_the_system_prompt_is_for_those_that_have_none():
    assert with_system_prompt([ASKED], "Be brief.") == [turn("system", "Be brief."), ASKED]
    own = [turn("system", "Be long."), ASKED]
    assert with_system_prompt(own, "Be brief.") == own
    assert with_system_prompt([ASKED], None) == [ASKED]


def test_every_token_of_a_text_but_the_first_is_a_target(tokenizer):
    features = encode_text("Two and two is four.", tokenizer)
    assert tokenizer.decode(features.arrays["input_ids"].tolist()) == "Two and two is four.<|endoftext|>"
    assert features.arrays["is_target"].tolist() == [False] + [True] * (features.length - 1)
    assert encode_text("", tokenizer) is None


def test_half_a_character_is_named_and_spoils_no_other_row(tokenizer):
    half = json.loads('"Two \\ud800 and"')
    wrong, well = TextEncoder(tokenizer)([{"text": half}, {"text": "Two"}])
    assert (
        str(wrong) == "contains half of a surrogate pair (\\ud800) after 'Two ', which is not valid Unicode. Remove it."
    )
    assert well.num_targets == well.length - 1
    with refused(DataError):
        encode_turns([ASKED, turn("assistant", half)], tokenizer)


def test_a_tokenizer_without_end_of_sequence_is_rejected_for_plain_text(make_tokenizer):
    with refused(DataError):
        encode_text("Two", make_tokenizer(eos_token=None))


def test_the_identity_changes_with_template_and_vocabulary_and_not_with_use(tokenizer, make_tokenizer):
    before = tokenizer_identity(tokenizer)
    tokenizer(["Two", "Two and two is four."], padding=False, truncation=True, max_length=2)
    assert tokenizer_identity(tokenizer) == before
    other = make_tokenizer(special=["<|endoftext|>"])
    set_chat_template(other, "chatml")
    assert tokenizer_identity(other)["tokenizer"] != before["tokenizer"]
    assert tokenizer_identity(other)["chat_template"] == before["chat_template"]
    tokenizer.chat_template += " "
    assert tokenizer_identity(tokenizer)["chat_template"] != before["chat_template"]


def test_a_tokenizer_that_drops_unknown_text_is_detected(make_tokenizer):
    def words(**keys):
        backend = Tokenizer(models.BPE(**keys))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(special_tokens=["<end>", "<unk>"], show_progress=False)
        backend.train_from_iterator(["a b c"], trainer)
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", **keys)

    assert words()("a ☃")["input_ids"] == words()("a")["input_ids"]
    assert drops_unknown_text(words())
    assert not drops_unknown_text(words(unk_token="<unk>"))
    assert not drops_unknown_text(make_tokenizer())


RESULT = {"content": "4", "name": "add"}
CALLING = turn("assistant", "Let me add.")
WITH_OWN_ROLE = """{% for m in messages %}{% if m.role in ['observation', 'critic'] %}<|{{ m.role }}|>{{ m.content }}
{% elif m.role == 'user' %}<|user|>{{ m.content }}
{% else %}<|bot|>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"""


def text_of(features, tokenizer):
    return tokenizer.decode(features.arrays["input_ids"].tolist())


@pytest.mark.parametrize("role", ["function", "tool_response", "Tool-Output", "observation", "ipython", "TOOL"])
def test_words_for_the_role_tool_are_that_role(role, tokenizer):
    found = encode_turns([ASKED, CALLING, {"role": role, **RESULT}, ANSWERED], tokenizer)
    assert "<|im_start|>tool\n4<|im_end|>" in text_of(found, tokenizer)


def test_roles_of_the_template_itself_stay_as_they_are(tokenizer):
    tokenizer.chat_template = WITH_OWN_ROLE
    talk = [ASKED, CALLING, {"role": "observation", **RESULT}, ANSWERED, turn("critic", "Good."), ANSWERED]
    text = text_of(encode_turns(talk, tokenizer), tokenizer)
    assert "<|observation|>4\n" in text and "<|critic|>Good.\n" in text


def test_an_unknown_role_is_refused_with_its_turn_and_the_roles_that_are_known(tokenizer):
    talk = [ASKED, turn("critic", "Good."), ANSWERED]
    with refused(DataError, "turn 2", "`critic`", "`human`", "`tool_response`"):
        encode_turns(talk, tokenizer)
    prompt = read_prompt(RawRow("rows.jsonl", 1, {"messages": talk[:2]}))
    with refused(DataError, "turn 2", "`critic`"):
        prompt_ids(tokenizer, prompt)


def test_prompts_have_the_roles_tools_and_shapes_of_training_rows(tokenizer):
    set_chat_template(tokenizer, "qwen")
    function = {"name": "add", "parameters": {}}
    rows = [
        {"messages": [ASKED, CALLING, turn("function", "4")], "functions": [function]},
        {"conversations": [ASKED, CALLING, turn("tool", "4")], "tools": [{"type": "function", "function": function}]},
    ]
    texts = [tokenizer.decode(prompt_ids(tokenizer, read_prompt(RawRow("a", 1, row)))) for row in rows]
    assert texts[0] == texts[1]
    assert "<tool_response>\n4" in texts[0] and '{"type": "function", "function": {"name": "add"' in texts[0]
    (answer, single) = (read_prompt(RawRow("a", 1, {"prompt": prompt})) for prompt in ([ASKED], ASKED))
    assert answer == single


def test_a_role_that_a_plugin_adds_is_known(tokenizer):
    ROLES.register(RoleEntry(name="critic", role="user", plugin=__name__))
    try:
        found = encode_turns([ASKED, ANSWERED, turn("Critic", "Why?"), ANSWERED], tokenizer)
    finally:
        ROLES.remove_plugin(__name__)
    assert "<|im_start|>user\nWhy?<|im_end|>" in text_of(found, tokenizer)
    with refused(RegistryError, "`critic`: `judge`"):
        RoleEntry(name="critic", role="judge")


def unread(turns, tokenizer, **keys):
    return set(encode_turns(turns, tokenizer, **keys).findings.unread_keys)


def test_keys_that_neither_the_template_nor_this_package_reads_are_found(tokenizer):
    answered = turn("assistant", "Four.", thoughts="Add.", wieght=0, reasoning_content="Add.", weight=1)
    asked = {**ASKED, "country": "US"}
    set_chat_template(tokenizer, "qwen")
    assert unread([asked, answered], tokenizer, train_on="per_message") == {"country", "thoughts", "wieght"}
    assert unread([ASKED, ANSWERED], tokenizer) == set()
    tokenizer.chat_template = WITH_OWN_ROLE.replace(
        "{{ m.content }}<|im_end|>", "{{ m.content }}{{ m['thoughts'] }}<|im_end|>"
    )
    assert unread([ASKED, turn("assistant", "Four.", thoughts="Add.", mood="good")], tokenizer) == {"mood"}


def test_a_template_that_writes_whole_turns_reads_their_keys(tokenizer):
    whole = "{{ m.content }}{% for name, value in m.items() %}{{ value }}{% endfor %}<|im_end|>"
    tokenizer.chat_template = WITH_OWN_ROLE.replace("{{ m.content }}<|im_end|>", whole)
    assert unread([{**ASKED, "country": "US"}, turn("assistant", "Four.", mood="good")], tokenizer) == {"country"}


def test_a_template_that_drops_one_of_the_texts_in_parts_is_named(tokenizer):
    texts = [{"type": "text", "text": "Two"}, {"type": "text", "text": " and two?"}]
    joined = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    tokenizer.chat_template = WITH_OWN_ROLE.replace("<|user|>{{ m.content }}", f"<|user|>{joined}")
    assert "<|user|>Two and two?" in text_of(encode_turns([turn("user", texts), ANSWERED], tokenizer), tokenizer)
    tokenizer.chat_template = WITH_OWN_ROLE.replace("<|user|>{{ m.content }}", "<|user|>{{ m.content[0].text }}")
    with refused(DataError, "' and two?'", "turn 1"):
        encode_turns([turn("user", texts), ANSWERED], tokenizer)
