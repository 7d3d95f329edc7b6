"""Ranks that share the tokens of every row learn what one process does."""

import pytest

from tests.devices import NEEDS_DEEPSPEED

full = pytest.mark.full
pytestmark = pytest.mark.distributed

PACKS = ["data.batching={by: packs, tokens: 61}", "train.microbatch_size=1", "train.global_batch_size=4"]


@pytest.fixture(scope="module")
def alone(launch):
    run = launch(None, name="rows-alone", overrides=["train.microbatch_size=8"])
    assert run.code == 0, run.output
    return run


def test_two_ranks_that_share_rows_learn_what_one_does(launch, alone):
    run = launch("ddp_sequence_parallel", name="rows-ddp", overrides=["train.microbatch_size=2"])
    assert run.code == 0, run.output
    assert "shares sequences over groups of 2" in run.output
    assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)
    assert run.norms() == pytest.approx(alone.norms(), rel=1e-4)
    assert run.last_metrics() == pytest.approx(alone.last_metrics(), rel=1e-4)
