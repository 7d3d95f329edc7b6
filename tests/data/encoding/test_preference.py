import numpy as np
import pytest

from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.encoding.preference import IS_GOOD, MARGIN, PreferenceEncoder
from finetune.data.features import LENGTHS_OF_SEQUENCES
from finetune.data.templates.chat_template import set_chat_template
from finetune.errors import DataError


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def row(prompt: str, chosen: str, rejected: str, **more) -> dict:
    sides = {"chosen": [turn("assistant", chosen)], "rejected": [turn("assistant", rejected)]}
    return {"prompt": [turn("user", prompt)], **sides, **more}


def judged(prompt: str, answer: str, is_good: bool) -> dict:
    return {"prompt": [turn("user", prompt)], "completion": [turn("assistant", answer)], "is_good": is_good}


@pytest.fixture
def encoder(tokenizer):
    set_chat_template(tokenizer, "chatml")
    return ConversationEncoder(tokenizer)


def texts(features, tokenizer) -> list[tuple[str, str]]:
    """Return each sequence as text, and its targets."""
    ends = np.cumsum(features.arrays[LENGTHS_OF_SEQUENCES])[:-1]
    parts = zip(np.split(features.arrays["input_ids"], ends), np.split(features.arrays["is_target"], ends), strict=True)
    return [(tokenizer.decode(ids), tokenizer.decode(ids[is_target])) for ids, is_target in parts]


def whole(prompt: str, answer: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def test_a_preference_pair_is_two_conversations_with_their_answers_as_targets(encoder, tokenizer):
    (features,) = PreferenceEncoder(encoder, "`t`")([row("a?", "yes", "no")])
    found = texts(features, tokenizer)
    assert [text.startswith(whole("a?", answer)[:-1]) for (text, _), answer in zip(found, ("yes", "no"), strict=True)]
    assert [target.removesuffix("\n") for _, target in found] == ["yes<|im_end|>", "no<|im_end|>"]


def test_judged_answers_come_with_the_next_rows_answer(encoder, tokenizer):
    rows = [judged("a?", "one", True), judged("b?", "two", False), row("c?", "three", "four")]
    first, second, third = PreferenceEncoder(encoder, "`t`", judged=True)(rows)
    assert [target for _, target in texts(first, tokenizer)] == ["one<|im_end|>", "two<|im_end|>"]
    assert texts(first, tokenizer)[1][0].startswith(whole("a?", "two")[:-1])
    assert [target for _, target in texts(second, tokenizer)] == ["two<|im_end|>", "three<|im_end|>"]
    assert [target.removesuffix("<|im_end|>") for _, target in texts(third, tokenizer)] == [
        *("three", "four"),
        *("one", "one"),
    ]
    assert [each.arrays[IS_GOOD].tolist() for each in (first, second, third)] == [[True], [False], [True, False]]


def partners_of(answers, encoder, tokenizer):
    """Return the mismatched answer of each of the answers, which are given with their prompts: `a?one`."""
    rows = [judged(*answer.split("?"), True) for answer in answers]
    encoded = PreferenceEncoder(encoder, "`t`", judged=True)(rows)
    return [texts(each, tokenizer)[1][1].removesuffix("<|im_end|>") for each in encoded], encoded


@pytest.mark.parametrize(
    ("answers", "partners"),
    [
        (["a?one", "a?two", "b?three", "b?four"], ["three", "three", "one", "one"]),
        (["a?one", "b?two", "a?three", "a?four"], ["two", "three", "two", "two"]),
        (["a?one", "b?two"], ["two", "one"]),
    ],
)
def test_a_mismatched_answer_is_that_of_the_next_row_with_another_prompt(encoder, tokenizer, answers, partners):
    found, encoded = partners_of(answers, encoder, tokenizer)
    assert found == partners
    assert not any("same_prompt_rows" in each.findings.flags for each in encoded)


def test_without_another_prompt_the_next_row_is_taken_and_marked(encoder, tokenizer):
    found, encoded = partners_of(["a?one", "a?two", "a?three"], encoder, tokenizer)
    assert found == ["two", "three", "one"]
    assert all("same_prompt_rows" in each.findings.flags for each in encoded)


def test_margins_are_kept_where_they_are_used(encoder):
    (features,) = PreferenceEncoder(encoder, "`t`", margin=True)([row("a?", "yes", "no", margin=0.5)])
    assert features.arrays[MARGIN].tolist() == [0.5]
    (wrong,) = PreferenceEncoder(encoder, "`t`", margin=True)([row("a?", "yes", "no")])
    assert isinstance(wrong, DataError)
    assert "use_margin: false" in str(wrong)


def test_a_row_without_an_answer_pair_is_rejected_with_the_format_to_write(encoder):
    (wrong,) = PreferenceEncoder(encoder, "`task.name: reward`")([{"messages": [turn("user", "a?")]}])
    assert isinstance(wrong, DataError)
    assert str(wrong).startswith("`task.name: reward` trains on pairs of answers")
    assert "`format: preference`" in str(wrong)
