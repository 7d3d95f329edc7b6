"""Sums are added up in the width in which they were kept."""

import torch

from finetune.train.meters import numbers

BEYOND_FLOAT32 = 2**24 + 1  # the first whole number that float32 rounds


def test_a_count_of_targets_that_float32_would_round_stays_exact():
    sums = {
        "num_targets": torch.tensor(BEYOND_FLOAT32, dtype=torch.float64),
        "loss_sum": torch.tensor(0.5, dtype=torch.float64),
    }
    assert numbers(sums) == {"num_targets": BEYOND_FLOAT32, "loss_sum": 0.5}


def test_nothing_adds_up_to_nothing():
    assert numbers({}) == {}
