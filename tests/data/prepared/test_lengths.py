"""What is too long is refused, dropped, cut or split, and every token and target that is lost is counted."""

import numpy as np
import pytest

from finetune.data.features import Features
from finetune.data.prepared.counts import Counts
from finetune.data.prepared.lengths import LengthPolicy

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


@pytest.mark.parametrize("over_length", ["refuse", "drop"])
def test_what_is_left_out_is_counted(over_length):
    samples, counts = LengthPolicy(6, over_length).shorten(TEN)
    assert samples == ()
    assert counts == Counts(long_rows=1, dropped_tokens=10, dropped_targets=5)


def test_the_end_is_cut_off():
    (sample,), counts = LengthPolicy(6, "truncate", "end").shorten(TEN)
    assert shown(sample) == "0 1 [2] [3] 4 [5]"
    assert sample.arrays["label"].tolist() == [7]
    assert counts == Counts(truncated_rows=1, truncated_tokens=4, truncated_targets=2)


def test_where_the_start_is_cut_off_the_first_token_left_cannot_be_predicted_and_is_lost_as_a_target():
    (sample,), counts = LengthPolicy(5, "truncate", "start").shorten(TEN)
    assert shown(sample) == "5 6 7 [8] [9]"
    assert counts == Counts(truncated_rows=1, truncated_tokens=5, truncated_targets=3)
    assert shown(TEN) == "0 1 [2] [3] 4 [5] 6 7 [8] [9]"  # the sample itself is as it was


def test_windows_overlap_by_one_token_so_that_every_target_is_learnt_once():
    samples, counts = LengthPolicy(4, "split").shorten(TEN)
    assert [shown(sample) for sample in samples] == ["0 1 [2] [3]", "3 4 [5] 6", "6 7 [8] [9]"]
    assert counts == Counts(split_rows=1)


def test_windows_without_a_target_are_left_out_and_their_tokens_counted():
    quiet = Features({"input_ids": np.arange(9, dtype=np.uint32), "is_target": np.arange(9) == 8})
    samples, counts = LengthPolicy(4, "split").shorten(quiet)
    assert [shown(sample) for sample in samples] == ["6 7 [8]"]
    assert counts == Counts(split_rows=1, dropped_tokens=6)


def test_a_row_without_any_target_is_no_split_row():
    silent = Features({"input_ids": np.arange(9, dtype=np.uint32), "is_target": np.zeros(9, bool)})
    assert LengthPolicy(4, "split").shorten(silent) == ((), Counts())


@pytest.mark.parametrize("length", range(5, 40))
@pytest.mark.parametrize("max_length", [2, 3, 4])
def test_no_target_is_lost_whatever_the_lengths(length, max_length):
    all_but_first = Features({"input_ids": np.arange(length, dtype=np.uint32), "is_target": np.arange(length) > 0})
    windows, counts = LengthPolicy(max_length, "split").shorten(all_but_first)
    learnt = [window.arrays["input_ids"][window.arrays["is_target"]] for window in windows]
    assert np.concatenate(learnt).tolist() == list(range(1, length))
    assert max(window.length for window in windows) == max_length
    assert counts == Counts(split_rows=1)
