"""`train_on: each_assistant`: every answer is a sample of its own, as the model will be asked for it."""

import pytest

from finetune.config.sections.data import DataSection, TrainingSourceSection
from finetune.data.encoding.conversation import ConversationEncoder
from finetune.data.rows import RawRow
from finetune.data.template_check import check_template
from finetune.data.templates.chat_template import set_chat_template
from finetune.data.templates.rendering import set_template_arguments
from finetune.data.token_cache.chunks import Encoding, encode_chunk
from finetune.data.token_cache.lengths import SampleLengthLimit
from finetune.errors import DataError
from tests.data.template_rows import CALCULATOR, trained_tokenizer
from tests.data.template_tokenizers import shipped_templates, targets, tokenizer_for
from tests.refusals import refused

TEMPLATES = shipped_templates()
shipped = pytest.mark.skipif(not TEMPLATES, reason="trl, whose chat templates are the test data, is not installed")


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


TALK = [user("Two and two?"), assistant("Four."), user("And three?"), assistant("Six.")]
THOUGHTFUL = [
    user("Two and two?"),
    assistant("Four.", reasoning_content="A pair of pairs."),
    user("And three?"),
    assistant("Six.", reasoning_content="A pair of threes."),
]


def samples(tokenizer, turns, **keys):
    (outcome,) = ConversationEncoder(tokenizer, train_on="each_assistant")([{"messages": turns, **keys}])
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


def asked(tokenizer, turns, **keys):
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False, **keys)


@shipped
@pytest.mark.parametrize("turns", [TALK, THOUGHTFUL], ids=["plain", "thoughtful"])
def test_each_qwen3_answer_is_trained_on_with_the_prompt_of_inference(turns):
    tokenizer = trained_tokenizer(TEMPLATES["qwen3"])
    first, second = samples(tokenizer, turns)
    for sample, num_turns in ((first, 1), (second, 3)):
        ids, prompt = sample.arrays["input_ids"].tolist(), asked(tokenizer, turns[:num_turns])
        assert ids[: len(prompt)] == prompt
        assert not sample.arrays["is_target"][: len(prompt)].any()
        assert sample.arrays["is_target"][len(prompt) : -1].all()
        whole = tokenizer.apply_chat_template(turns[: num_turns + 1], tokenize=True, return_dict=False)
        assert ids == whole
    thoughts = ("A pair of pairs.", "A pair of threes.") if turns is THOUGHTFUL else ("", "")
    assert [targets(each, tokenizer) for each in (first, second)] == [
        [f"<think>\n{thought}\n</think>\n\n{said}<|im_end|>"]
        for thought, said in zip(thoughts, ("Four.", "Six."), strict=True)
    ]
    assert "pair of pairs" not in tokenizer.decode(second.arrays["input_ids"].tolist())  # as at inference


@shipped
def test_a_prompt_that_the_answer_would_change_is_the_one_that_is_asked():
    """gpt-oss shows the analysis before a call until an answer follows: the model sees it, the whole has it not."""
    tokenizer = trained_tokenizer(TEMPLATES["gptoss"])
    function = {"name": "calculate", "arguments": {"expression": "2 + 2"}}
    calling = assistant("", thinking="I add.", tool_calls=[{"id": "1", "type": "function", "function": function}])
    turns = [user("Two and two?"), calling, {"role": "tool", "name": "calculate", "content": "4"}, assistant("Four.")]
    for arguments in ({}, {"reasoning_effort": "high"}):
        set_template_arguments(tokenizer, arguments)
        call, answer = samples(tokenizer, turns, tools=[CALCULATOR])
        for sample, num_turns in ((call, 1), (answer, 3)):
            prompt = asked(tokenizer, turns[:num_turns], tools=[CALCULATOR], **arguments)
            assert sample.arrays["input_ids"].tolist()[: len(prompt)] == prompt
        assert "I add." in tokenizer.decode(answer.arrays["input_ids"].tolist())
        assert targets(answer, tokenizer) == ["<|channel|>final<|message|>Four.<|return|>"]
    (whole,) = ConversationEncoder(tokenizer, train_on="last_assistant")([{"messages": turns, "tools": [CALCULATOR]}])
    assert "Set data.train_on: each_assistant" in str(whole)


@shipped
def test_an_answer_that_does_not_begin_as_its_prompt_ends_is_refused():
    with refused(DataError):
        samples(trained_tokenizer(TEMPLATES["deepseek_r1_distill"]), TALK)


def test_assistant_turns_in_a_prompt_are_not_samples(tokenizer):
    set_chat_template(tokenizer, "chatml")
    assert len(samples(tokenizer, TALK)) == 2
    (only,) = samples(tokenizer, TALK, num_context_turns=3)
    assert targets(only, tokenizer) == ["Six.<|im_end|>"]
    (only,) = samples(tokenizer, [*TALK[:2], user("And?")])
    assert targets(only, tokenizer) == ["Four.<|im_end|>"]
    assert ConversationEncoder(tokenizer, train_on="each_assistant")([{"messages": TALK[:1]}]) == [None]


def encoded(tokenizer, rows, *, max_length=1000, over_length="drop"):
    section = DataSection(train=TrainingSourceSection(path="/nowhere.jsonl"), max_length=max_length)
    encoding = Encoding(
        ConversationEncoder(tokenizer, train_on="each_assistant"),
        section,
        identity={},
        length=SampleLengthLimit(max_length, over_length),
    )
    return encode_chunk(encoding, [RawRow("rows.jsonl", n, row) for n, row in enumerate(rows, start=1)])


def test_rows_and_their_answers_are_counted(tokenizer):
    set_chat_template(tokenizer, "chatml")
    rows = [{"messages": TALK}, {"messages": TALK[:2]}, {"messages": TALK[:1]}]
    chunk = encoded(tokenizer, rows)
    whole = [tokenizer.apply_chat_template(TALK[: 2 * n], tokenize=True, return_dict=False) for n in (1, 2)]
    short, long = map(len, whole)
    counts = chunk.counts
    assert (counts.rows, counts.answers, counts.samples, counts.rows_without_target) == (3, 3, 3, 1)
    assert counts.repeated_tokens == short == chunk.lengths["input_ids"][0]
    assert chunk.lengths["input_ids"].tolist() == [short, long, short]
    assert chunk.row_numbers.tolist() == [1, 1, 2]
    line = f"each answer is a sample: 3 answers; {short} tokens are repeated from other samples of the same row"
    assert line in counts.lines()


def test_each_answer_has_its_own_length(tokenizer):
    set_chat_template(tokenizer, "chatml")
    rows = [{"messages": [*TALK, user("And?"), assistant("Eight.")]}] * 2
    short, middle, _ = encoded(tokenizer, rows).lengths["input_ids"].tolist()[:3]
    dropped = encoded(tokenizer, rows, max_length=short)
    assert dropped.lengths["input_ids"].tolist() == [short, short]
    assert dropped.counts.long_rows == 2
    split = encoded(tokenizer, rows, max_length=middle, over_length="split")
    assert split.counts.split_rows == 2
    cut = encoded(tokenizer, rows, max_length=short, over_length="truncate")
    assert cut.counts.truncated_rows == 2


@shipped
def test_the_template_check_of_each_answer_finds_no_differences():
    section = DataSection(train=TrainingSourceSection(path="/nowhere.jsonl"), max_length=64, train_on="each_assistant")
    check = check_template(tokenizer_for(TEMPLATES["qwen3"]), section)
    assert {"several answers", "tools"} <= set(check.trained_cases)
    assert check.differences == ()
    tokenizer = tokenizer_for(TEMPLATES["qwen3"])
    set_template_arguments(tokenizer, {"enable_thinking": False})
    check = check_template(tokenizer, section)
    assert check.arguments == {"enable_thinking": False}
    assert "  rendered with enable_thinking: false" in list(check.lines())
    assert check.differences == ()
