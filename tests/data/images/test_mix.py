"""Two images become one, and the share of each label is the share of each image."""

from random import Random

import pytest
import torch

from finetune.data.images.mix import mix

ONE, OTHER = torch.zeros(1, 8, 6), torch.ones(1, 8, 6)


def test_mixup_blends_every_pixel_by_the_share():
    for seed in range(20):
        mixed = mix(ONE, OTHER, mixup=0.4, cutmix=0.0, chance=Random(seed))
        assert torch.equal(mixed.pixels, torch.full_like(ONE, 1 - mixed.share))


def test_cutmix_replaces_as_much_as_the_share_says():
    shares = set()
    for seed in range(50):
        mixed = mix(ONE, OTHER, mixup=0.0, cutmix=1.0, chance=Random(seed))
        assert mixed.pixels.mean().item() == pytest.approx(1 - mixed.share, abs=1e-6)
        assert set(mixed.pixels.unique().tolist()) <= {0.0, 1.0}
        shares.add(mixed.share)
    assert len(shares) > 15
    assert ONE.sum() == 0  # what was handed in is left as it was


def test_with_both_each_is_taken():
    kinds = {len(mix(ONE, OTHER, mixup=1.0, cutmix=1.0, chance=Random(seed)).pixels.unique()) for seed in range(30)}
    assert kinds == {1, 2}
