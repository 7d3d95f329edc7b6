import pytest

from finetune.checkpoint.write import saver
from finetune.runtime.supervision import heartbeat
from finetune.runtime.supervision.heartbeat import VARIABLE


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def fail(monkeypatch):
    """Set faults that strike in this test, and let the tries to write follow one another at once."""

    def set_faults(*faults):
        monkeypatch.setattr(saver, "RETRY_PAUSES_SECONDS", (0.0, 0.0))
        monkeypatch.setenv(VARIABLE, "; ".join(faults))
        heartbeat.read_faults.cache_clear()  # faults of the same words have struck in another test

    return set_faults
