"""Convolutions and scans over a row of samples are those of each sample alone, in few calls."""

import pytest
import torch
from torch.nn.functional import conv1d

from finetune.model.attention.packed_scans import ScanInputs, convolve_samples, group_by_length, scan_samples
from finetune.runtime.packed_rows import SampleLengths

LENGTHS = (70, 1, 33, 2, 64, 5, 70)


def convolve(row, weight, bias=None):
    return conv1d(row, weight[:, None], bias, padding=weight.shape[-1] - 1, groups=row.shape[1])[:, :, : row.shape[2]]


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_a_convolution_reads_zeros_before_each_sample_in_one_call(reach):
    calls = []

    def counted(*given):
        calls.append(given)
        return convolve(*given)

    row, weight, bias = torch.randn(1, 3, sum(LENGTHS)), torch.randn(3, reach), torch.randn(3)
    expected = torch.cat([convolve(each, weight, bias) for each in row.split(LENGTHS, 2)], dim=2)
    torch.testing.assert_close(convolve_samples(counted, SampleLengths(LENGTHS), row, weight, bias), expected)
    assert len(calls) == 1


def decaying_sum(values, decay, scale, *, chunk_size=64, seen):
    """Return a scan over [batch, time, width]: what came before, decayed, and the value."""
    seen.append((tuple(values.shape[:2]), chunk_size))
    state, outputs = torch.zeros_like(values[:, 0]), []
    for value, factor in zip(values.unbind(1), decay.unbind(1), strict=True):
        state = state * factor + value * scale
        outputs.append(state)
    return torch.stack(outputs, 1), None


def test_a_scan_runs_over_groups_of_similar_length_in_blocks_no_longer_than_they_are():
    inputs = ScanInputs(frozenset({0, "decay"}), dimension=1, chunk_size="chunk_size")
    values, decay = (torch.randn(1, sum(LENGTHS), 2, requires_grad=True) for _ in range(2))
    seen, alone = [], []
    row, state = scan_samples(
        decaying_sum, SampleLengths(LENGTHS), inputs, (values,), {"decay": decay.sigmoid(), "scale": 0.5, "seen": seen}
    )
    assert state is None
    assert seen == [((3, 70), 64), ((1, 33), 33), ((3, 5), 5)]
    parts = zip(values.split(LENGTHS, 1), decay.sigmoid().split(LENGTHS, 1), strict=True)
    expected = torch.cat([decaying_sum(*part, 0.5, seen=alone)[0] for part in parts], dim=1)
    torch.testing.assert_close(row, expected)
    ours, theirs = (torch.autograd.grad(each.square().sum(), (values, decay)) for each in (row, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("lengths", "groups"),
    [
        ((5,), [[0]]),
        ((9, 9, 9), [[0, 1, 2]]),
        ((1, 17, 18), [[2, 1], [0]]),
        ((100, 76, 74, 400), [[3], [0, 1], [2]]),
    ],
)
def test_a_group_pads_no_more_than_a_quarter_or_a_few_tokens(lengths, groups):
    assert group_by_length(lengths) == groups
