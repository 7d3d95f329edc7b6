"""One healthy project and its two servers for all cases of a session."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # for the modules beside the tests, which are none
from cases import Ground
from forked import PLAIN, WITH_TORCH, Server


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    with Server(PLAIN) as plain, Server(WITH_TORCH) as with_torch:
        yield Ground(tmp_path_factory.mktemp("fuzz"), plain=plain, with_torch=with_torch)
