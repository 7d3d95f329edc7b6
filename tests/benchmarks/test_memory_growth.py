"""Memory of a run on CPUs stays where its first steps have brought it."""

import pytest
from memory_growth import NUM_PROCESSES, grow


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", NUM_PROCESSES)
def test_memory_after_2000_steps_of_varying_lengths(strategy, figure):
    grown = grow(strategy, steps=2000)
    figure(f"peak after 2,000 steps over that of the first 100, {strategy}", grown.growth, at_most=1.15)
