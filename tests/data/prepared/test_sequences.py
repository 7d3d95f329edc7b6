import numpy as np
import pytest

from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.prepared.sequences import SequencesPolicy


def pair(prompt: int, *answers: int) -> Features:
    """Return sequences of a prompt (tokens 0, 1, ...) and an answer (100, 101, ...), all of which is a target."""
    ids = [token for answer in answers for token in (*range(prompt), *range(100, 100 + answer))]
    lengths = np.array([prompt + answer for answer in answers], np.int32)
    arrays = {"input_ids": np.array(ids, np.uint32), "is_target": np.array([i >= 100 for i in ids])}
    return Features({**arrays, LENGTHS_OF_SEQUENCES: lengths})


def told(features: Features) -> list[list[int]]:
    ends = np.cumsum(features.arrays[LENGTHS_OF_SEQUENCES])[:-1]
    return [part.tolist() for part in np.split(features.arrays["input_ids"], ends)]


def test_the_longest_sequence_decides_whether_a_sample_is_too_long():
    policy = SequencesPolicy(6, "refuse")
    assert policy.fits(pair(3, 3, 2))
    assert not policy.fits(pair(3, 2, 4))
    assert pair(3, 2, 4).longest == 7
    kept, counts = policy.shorten(pair(3, 2, 4))
    assert (kept, counts.long_rows, counts.dropped_tokens, counts.dropped_targets) == ((), 1, 12, 6)


def test_ends_are_cut_from_each_answer_that_is_too_long():
    (kept,), counts = SequencesPolicy(5, "truncate").shorten(pair(3, 1, 4))
    assert told(kept) == [[0, 1, 2, 100], [0, 1, 2, 100, 101]]
    assert (counts.truncated_rows, counts.truncated_tokens, counts.truncated_targets) == (1, 2, 2)


def test_a_start_is_cut_alike_from_both_so_that_they_keep_one_prompt():
    (kept,), counts = SequencesPolicy(5, "truncate", "start").shorten(pair(3, 1, 4))
    assert told(kept) == [[2, 100], [2, 100, 101, 102, 103]]
    assert kept.num_targets == 5
    assert (counts.truncated_tokens, counts.truncated_targets) == (4, 0)


def test_the_first_token_of_what_is_left_is_no_target():
    (kept,), _ = SequencesPolicy(3, "truncate", "start").shorten(pair(2, 4, 5))
    assert told(kept) == [[102, 103], [102, 103, 104]]
    assert kept.arrays["is_target"].tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("side", ["end", "start"])
def test_a_sample_of_which_an_answer_is_cut_off_has_no_target_left(side):
    features = pair(8, 2, 9) if side == "end" else pair(1, 1, 9)
    (kept,), counts = SequencesPolicy(8 if side == "end" else 4, "truncate", side).shorten(features)
    assert kept.num_targets == 0
    assert counts.truncated_targets == features.num_targets
