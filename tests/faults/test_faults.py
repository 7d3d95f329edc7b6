"""Whatever befalls a run, it goes on to the end that it has undisturbed, or stops with one clear message."""

import pytest

from tests.faults.__main__ import format_outcome
from tests.faults.runner import Ground
from tests.faults.schedule import Chain

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]


def test_a_run_recovers_from_a_chain_of_faults(chain: Chain, ground: Ground):
    outcome = ground.run(chain)
    print(format_outcome(outcome))
    if outcome.skipped:
        pytest.skip(outcome.skipped)
    assert not outcome.violations, format_outcome(outcome)
    assert outcome.num_attempts >= 1
