"""What is too long is refused, dropped, cut or split, and every token and target that is lost is counted."""

import numpy as np
import pytest

from finetune.data.features import LENGTHS_OF_SEQUENCES, Features
from finetune.data.token_cache.counts import Counts
from finetune.data.token_cache.lengths import SampleLengthLimit, SequencesLengthLimit

TEN = Features(
    {
        "input_ids": np.arange(10, dtype=np.uint32),
        "is_target": np.array([False, False, True, True, False, True, False, False, True, True]),
        "label": np.array([7]),
    }
)
"""Five targets: 2, 3, 5, 8 and 9."""


def shown(features):
    """Return each token, those that count in brackets: `0 1 [2]`."""
    pairs = zip(features.arrays["input_ids"].tolist(), features.arrays["is_target"].tolist(), strict=True)
    return " ".join(f"[{token}]" if is_target else str(token) for token, is_target in pairs)


LEFT_OUT = Counts(long_rows=1, dropped_tokens=10, dropped_targets=5)


@pytest.mark.parametrize(
    ("policy", "left", "counts"),
    [
        ((6, "refuse"), [], LEFT_OUT),
        ((6, "drop"), [], LEFT_OUT),
        (
            (6, "truncate", "end"),
            ["0 1 [2] [3] 4 [5]"],
            Counts(truncated_rows=1, truncated_tokens=4, truncated_targets=2),
        ),
        # the first of those that are left cannot be a target
        (
            (5, "truncate", "start"),
            ["5 6 7 [8] [9]"],
            Counts(truncated_rows=1, truncated_tokens=5, truncated_targets=3),
        ),
    ],
)
def test_tokens_that_are_left_out_or_cut_off_are_counted(policy, left, counts):
    samples, found = SampleLengthLimit(*policy).shorten(TEN)
    assert ([shown(sample) for sample in samples], found) == (left, counts)
    assert [sample.arrays["label"].tolist() for sample in samples] == [[7]] * len(left)
    assert shown(TEN) == "0 1 [2] [3] 4 [5] 6 7 [8] [9]"  # the sample itself is as it was


def test_windows_overlap_by_one_token_so_that_every_target_counts_once():
    samples, counts = SampleLengthLimit(4, "split").shorten(TEN)
    assert [shown(sample) for sample in samples] == ["0 1 [2] [3]", "3 4 [5] 6", "6 7 [8] [9]"]
    assert counts == Counts(split_rows=1)


def test_windows_without_a_target_are_left_out_and_their_tokens_counted():
    quiet = Features({"input_ids": np.arange(9, dtype=np.uint32), "is_target": np.arange(9) == 8})
    samples, counts = SampleLengthLimit(4, "split").shorten(quiet)
    assert [shown(sample) for sample in samples] == ["6 7 [8]"]
    assert counts == Counts(split_rows=1, dropped_tokens=6)


@pytest.mark.parametrize("length", range(5, 40))
@pytest.mark.parametrize("max_length", [2, 3, 4])
def test_splitting_loses_no_target_for_any_length(length, max_length):
    all_but_first = Features({"input_ids": np.arange(length, dtype=np.uint32), "is_target": np.arange(length) > 0})
    windows, counts = SampleLengthLimit(max_length, "split").shorten(all_but_first)
    targets = [window.arrays["input_ids"][window.arrays["is_target"]] for window in windows]
    assert np.concatenate(targets).tolist() == list(range(1, length))
    assert max(window.length for window in windows) == max_length
    assert counts == Counts(split_rows=1)


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
    policy = SequencesLengthLimit(6, "refuse")
    assert policy.fits(pair(3, 3, 2))
    assert not policy.fits(pair(3, 2, 4))
    assert pair(3, 2, 4).longest == 7
    kept, counts = policy.shorten(pair(3, 2, 4))
    assert (kept, counts.long_rows, counts.dropped_tokens, counts.dropped_targets) == ((), 1, 12, 6)


def test_ends_are_cut_from_each_answer_that_is_too_long():
    (kept,), counts = SequencesLengthLimit(5, "truncate").shorten(pair(3, 1, 4))
    assert told(kept) == [[0, 1, 2, 100], [0, 1, 2, 100, 101]]
    assert (counts.truncated_rows, counts.truncated_tokens, counts.truncated_targets) == (1, 2, 2)


def test_both_answers_of_a_pair_lose_the_same_start_and_keep_one_prompt():
    (kept,), counts = SequencesLengthLimit(5, "truncate", "start").shorten(pair(3, 1, 4))
    assert told(kept) == [[2, 100], [2, 100, 101, 102, 103]]
    assert kept.num_targets == 5
    assert (counts.truncated_tokens, counts.truncated_targets) == (4, 0)


def test_the_first_remaining_token_of_a_truncated_pair_is_not_a_target():
    (kept,), _ = SequencesLengthLimit(3, "truncate", "start").shorten(pair(2, 4, 5))
    assert told(kept) == [[102, 103], [102, 103, 104]]
    assert kept.arrays["is_target"].tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("side", ["end", "start"])
def test_a_sample_of_which_an_answer_is_cut_off_has_no_target_left(side):
    features = pair(8, 2, 9) if side == "end" else pair(1, 1, 9)
    (kept,), counts = SequencesLengthLimit(8 if side == "end" else 4, "truncate", side).shorten(features)
    assert kept.num_targets == 0
    assert counts.truncated_targets == features.num_targets
