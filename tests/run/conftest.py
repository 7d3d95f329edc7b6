"""The small job of the scenarios, for what must train to be tested."""

from tests.scenarios.conftest import begin, job, launch, trained

__all__ = ["begin", "job", "launch", "trained"]
