import numpy as np

from finetune.data.audit.histogram import histogram, length_histogram, quantiles


def test_short_lengths_have_a_bar_each():
    found = length_histogram(np.array([1, 1, 3]))
    assert found.edges == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert found.bars == (0, 2, 0, 1)


def test_long_lengths_share_bars_of_whole_tokens():
    found = length_histogram(np.array([10, 1000]), most_bars=32)
    assert len(found.bars) <= 32 and sum(found.bars) == 2
    assert found.edges[1] == 32.0
    assert found.edges[-1] > 1000


def test_everything_is_in_a_bar():
    assert histogram(np.array([0.0, 0.5, 1.0]), upper=1.0, num_bars=4).bars == (1, 0, 1, 1)


def test_a_quantile_is_a_length_that_occurs():
    assert quantiles(np.array([7, 1, 9]))["p50"] == 7
    assert quantiles(np.array([], np.int64)) == {}
