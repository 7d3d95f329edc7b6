import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for small_run and launching, which are no tests


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"
