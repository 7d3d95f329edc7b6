"""A prepared set as a pool: what it is known by, and what is told of its packs."""

import numpy as np
import pytest

from finetune.config.sections.data import BatchingSection, DataSection, TrainingSourceSection
from finetune.data.order.by_length import ByLength
from finetune.data.prepared.counts import Counts
from finetune.data.prepared.set_pool import by_length, set_pool

LENGTHS = np.array([6, 5, 5, 3, 1])


class Prepared:
    """What a pool needs of a prepared set."""

    lengths = LENGTHS
    fingerprint = "f"
    counts = Counts()

    def lengths_of(self, ids):
        return LENGTHS[ids]


def pool(prepared=None, **batching):
    source = TrainingSourceSection(path="/nowhere")
    section = DataSection(train=source, max_length=8, batching=BatchingSection(**batching))
    made = set_pool(prepared or Prepared(), section, seed=1, key="data.train")
    return by_length(made, section.batching, seed=1, global_batch_size=2)


def test_samples_one_by_one_are_known_by_the_set_alone():
    assert pool().fingerprint == "f"
    assert pool().epoch_tokens == 20
    assert pool().lines(10) == ()


def test_how_full_packs_are_is_told():
    assert pool(by="packs", tokens=10).lines(4) == ("data.train: 20 tokens in 2 packs of at most 10: 100.0% full",)
    assert pool(by="tokens").lines(4) == ("data.train: 20 tokens in 4 batches of at most 8: 62.5% full",)


@pytest.mark.parametrize(
    ("batching", "is_same"),
    [
        ({"padding_free": True}, True),
        ({"length_window_steps": 1}, True),  # alters no step
        ({"length_window_steps": 2}, False),
        ({"by": "packs"}, False),
        ({"by": "packs", "tokens": 9}, False),
        ({"by": "tokens"}, False),
    ],
)
def test_what_moves_samples_to_other_steps_makes_another_pool(batching, is_same):
    assert (pool(**batching).fingerprint == pool().fingerprint) == is_same


def test_the_budget_counts_however_it_was_written():
    assert pool(by="packs").fingerprint == pool(by="packs", tokens=8).fingerprint


def test_sorting_by_length_goes_over_whatever_order_there_is():
    assert isinstance(pool(length_window_steps=2).order, ByLength)
    assert sorted(pool(length_window_steps=2).order.samples(0, 5).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("batching", [{}, {"by": "tokens", "tokens": 8}, {"by": "packs"}], ids=str)
def test_samples_in_which_control_tokens_became_text_are_others_than_before(batching):
    with_names = Prepared()
    with_names.counts = Counts(control_rows=1)
    assert pool(**batching).fingerprint != pool(with_names, **batching).fingerprint
    assert pool(**batching).fingerprint == pool(**batching).fingerprint
