import torch

from finetune.commands.verify.comparison import EngineComparison, Limits
from finetune.commands.verify.expected import ExpectedAnswer, ServedAnswer

LIMITS = Limits(torch.tensor([0.01]), 0.001, "float16")


def problems_of(
    expected: list[str],
    served: str,
    *,
    scores: tuple[float, ...] = (),
    is_complete: bool = False,
    ends: bool = False,
    margins: tuple[float, ...] | None = None,
) -> list[str]:
    """Return the problems of an answer whose text grows so, token by token, each with a log-probability of -1."""
    length = len(expected)
    answer = ExpectedAnswer(
        tokens=tuple(range(length)),
        is_complete=ends,
        log_probabilities=(-1.0,) * length,
        margins=margins or (1.0,) * length,
        prefixes=("", *expected),
    )
    comparison = EngineComparison()
    actual = ServedAnswer(served, is_complete=is_complete, num_prompt_tokens=3, log_probabilities=scores)
    comparison.compare_answers([answer], [actual], num_tokens=[3], limits=LIMITS)
    return comparison.problems


def test_a_token_of_the_same_answer_with_another_log_probability_is_named():
    assert problems_of(["a", "ab"], "ab", scores=(-1.0, -1.005)) == []
    (problem,) = problems_of(["a", "ab"], "ab", scores=(-1.0, -1.05))
    assert "token 2 of answer 1 has the log-probability -1.0500 instead of -1.0000" in problem


def test_tokens_after_one_that_the_text_does_not_show_may_follow_another_one():
    """Of two invalid bytes that are nearly as likely, or two special tokens, rounding may choose the other one."""
    for hidden in ("a\ufffd", "a"):
        assert problems_of(["a", hidden, "ab"], "ab", scores=(-1.0, -1.0, -1.5)) == []
        assert len(problems_of(["a", hidden, "ab"], "ab", scores=(-1.0, -1.5, -1.0))) == 1


def test_an_answer_that_departs_where_two_tokens_are_nearly_as_likely_is_right():
    assert problems_of(["a", "ab", "abc"], "axy", margins=(1.0, 0.015, 1.0)) == []
    (problem,) = problems_of(["a", "ab", "abc"], "axy", margins=(0.015, 1.0, 1.0))
    assert "answer 1 is 'axy' instead of 'abc', from token 2 on" in problem


def test_bytes_that_only_together_are_a_character_are_one_departure():
    growing = ["a", "a\ufffd", "a\u00e9"]
    assert problems_of(growing, "a\u00e8", margins=(1.0, 1.0, 0.015)) == []
    assert len(problems_of(growing, "a\u00e8", margins=(0.015, 1.0, 1.0))) == 1


def test_an_answer_that_runs_on_after_its_end_is_named():
    (problem,) = problems_of(["a", "a"], "a and on", ends=True)
    assert "answer 1 does not end after 'a'" in problem
    assert problems_of(["a", "a"], "a", ends=True, is_complete=True) == []
