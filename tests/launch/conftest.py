"""What tests of several hosts share: their namespaces, and a folder for jobs, logs and caches."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import Host, cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """The host of Ray's head, and two others."""
    with cluster(2, has_head=True) as made:
        yield made
