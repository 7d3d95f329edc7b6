"""One healthy project and its two servers for all cases of a session."""

from collections.abc import Iterator

import pytest

from tests.fuzz.cases import Ground
from tests.fuzz.forked import PLAIN, WITH_TORCH, Server
from tests.verifier_server import start_server


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    start_server()  # not by a case, which may not write there
    with Server(PLAIN) as plain, Server(WITH_TORCH) as with_torch:
        yield Ground(tmp_path_factory.mktemp("fuzz"), plain=plain, with_torch=with_torch)
