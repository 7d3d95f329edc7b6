"""What is computed on padding, on batches whose lengths are known."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from finetune.data.audit.padding import measure_padding, plain_computed
from finetune.data.batch import Batch
from finetune.data.features import Features
from finetune.data.order.dataset_view import DatasetView
from finetune.data.order.order import SetOrder


@dataclass(frozen=True)
class Samples:
    """Samples of these lengths."""

    lengths: tuple[int, ...]

    def __getitem__(self, sample_id):
        return Features({"input_ids": np.zeros(self.lengths[sample_id], np.uint32)}, sample_id)

    def location(self, sample_id):
        return f"row {sample_id + 1}"

    def lengths_of(self, sample_ids):
        return np.array(self.lengths)[sample_ids]


def padded(features):
    """Stack samples as rows that are as long as the longest."""
    longest = max(each.length for each in features)
    return batch_of(features, rows=len(features), columns=longest)


def end_to_end(features):
    return batch_of(features, rows=1, columns=sum(each.length for each in features))


def batch_of(features, *, rows, columns):
    tokens, ids = sum(each.length for each in features), tuple(each.sample_id for each in features)
    return Batch({}, torch.zeros(rows, columns), num_targets=tokens, num_tokens=tokens, sample_ids=ids)


def measured(collate, lengths=(1, 9, 2, 8, 3, 7, 4, 6), **named):
    pool = DatasetView(Samples(lengths), SetOrder(seed=0, num_samples=len(lengths), shuffle=False), "print")
    return measure_padding(pool, collate, global_batch_size=4, microbatch_size=2, **named)


def test_padded_batches_compute_as_much_as_their_longest_samples():
    found = measured(padded)
    assert (found.num_batches, found.num_samples, found.tokens) == (4, 8, 40)
    assert found.computed == 2 * (9 + 8 + 7 + 6)
    assert found.share == pytest.approx(1 - 40 / 60)


def test_samples_end_to_end_have_no_padding():
    found = measured(end_to_end)
    assert found.share == 0.0
    assert found.plain_computed > 40
    assert found.saved == pytest.approx(1 - 40 / found.plain_computed)


def test_padding_of_encoder_decoder_batches_counts_encoder_positions():
    def sources(features):
        lengths = tuple(each.length - 1 for each in features)
        batch = batch_of(features, rows=len(features), columns=max(lengths))
        return replace(batch, lengths=lengths)

    found = measured(sources)
    assert (found.tokens, found.computed) == (40 - 8, 2 * (8 + 7 + 6 + 5))


def test_a_token_budget_reports_the_share_of_filled_positions():
    assert measured(end_to_end, budget=10).filled == pytest.approx(40 / 80)
    assert measured(end_to_end).filled is None


def test_a_set_smaller_than_a_step_is_looked_at_all_the_same():
    assert measured(padded, lengths=(5, 5)).num_samples == 4  # one step takes both samples twice


def test_plain_batches_are_those_of_the_same_samples():
    assert plain_computed(np.array([4, 4, 4]), microbatch_size=2) == 12
    assert plain_computed(np.array([1, 9]), microbatch_size=2) == 18
