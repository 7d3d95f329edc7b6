"""The slices of a row are the row, each token and each target once."""

import numpy as np
import pytest
import torch

from finetune.data.batch import IGNORED
from finetune.data.features import Features
from finetune.data.loader import slice_batch
from finetune.errors import StrategyError
from finetune.runtime.distributed import RankGroup
from finetune.task.model_inputs import collate_padded, collate_padding_free
from tests.refusals import refused


def features(*lengths):
    return [
        Features(
            {"input_ids": np.arange(10 * place, 10 * place + each, dtype=np.uint32), "is_target": np.arange(each) > 0},
            sample_id=place,
        )
        for place, each in enumerate(lengths)
    ]


def slices_of(batch, size):
    return [slice_batch(batch, RankGroup(size, place)) for place in range(size)]


def flat(slices, read):
    return torch.cat([read(each)[0] for each in slices])


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(8,), (5, 7, 4), (1,), (2,), (1, 1, 1), (7,), (3, 9, 1, 4), (24,)])
def test_slices_hold_every_token_and_every_target_of_the_row_once(lengths, size):
    row = collate_padding_free(features(*lengths))
    slices, total = slices_of(row, size), sum(lengths)
    assert len({each.labels.shape for each in slices}) == 1, "equal slices"
    for name in ("input_ids", "position_ids"):
        assert flat(slices, lambda each, name=name: each.inputs[name])[:total].equal(row.inputs[name][0])
    assert flat(slices, lambda each: each.labels)[:total].equal(row.labels[0])
    assert flat(slices, lambda each: each.labels)[total:].eq(IGNORED).all()
    assert sum(each.num_targets for each in slices) == row.num_targets
    assert sum(each.num_tokens for each in slices) == row.num_tokens
    assert [id for each in slices for id in each.counted_ids] == list(row.sample_ids)
    for each in slices:
        assert each.labels[0, each.targets.positions].equal(each.targets.labels)
        assert each.num_targets == len(each.targets.labels) == int((each.labels != IGNORED).sum())


def test_padding_that_evens_out_slices_is_a_separate_sample():
    last = slices_of(collate_padding_free(features(5, 1)), 4)[-1]
    assert (last.lengths, last.cumulative_lengths.tolist(), last.longest) == ((5, 1, 2), [0, 5, 6, 8], 5)
    assert last.inputs["position_ids"].tolist() == [[0, 1]]
    assert (last.num_tokens, last.num_slices, last.slice_number) == (0, 4, 3)


def test_slicing_a_padded_batch_is_rejected_with_the_setting_to_write():
    with refused(StrategyError):
        slice_batch(collate_padded(features(5, 1), pad_id=0), RankGroup(2, 0))
