"""How many faults, and which: `pytest -m slow tests/faults --faults 200 --fault-seed 0`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.runner import Ground
from tests.faults.schedule import chains_with

NUM_FAULTS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, default=NUM_FAULTS, help="how many faults tests/faults injects")
    parser.addoption("--fault-seed", type=int, default=0, help="the seed from which they are drawn")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each chain."""
    if "chain" in metafunc.fixturenames:
        count = metafunc.config.getoption("--faults", NUM_FAULTS)
        found = chains_with(metafunc.config.getoption("--fault-seed", 0), count)
        metafunc.parametrize("chain", found, ids=lambda chain: f"seed{chain.seed}-chain{chain.number}")


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """One folder for the workers of pytest-xdist, which share the undisturbed runs."""
    folder = tmp_path_factory.getbasetemp()
    yield Ground((folder.parent if folder.name.startswith("popen-") else Path(folder)) / "faults")
