import sys
from pathlib import Path

import pytest

from finetune.checkpoint import saver
from finetune.runtime import waypoints
from finetune.runtime.faults import VARIABLE

sys.path.append(str(Path(__file__).parent))  # for small_run and launching, which are no tests


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def fail(monkeypatch):
    """Set faults that strike in this test, and let the tries to write follow one another at once."""

    def set_faults(*faults):
        monkeypatch.setattr(saver, "PAUSES_SECONDS", (0.0, 0.0))
        monkeypatch.setenv(VARIABLE, "; ".join(faults))
        waypoints._faults.cache_clear()  # faults of the same words have struck in another test

    return set_faults
