"""Runs that are trained once for all tests of the gate, and the gate in this process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from finetune.commands.gate.gate import BASE, GateOptions, evaluate_against
from tests.commands.gate.planted import PlantedRuns, read_result
from tests.scenarios.trained import forget

Gate = Callable[..., tuple[int, dict]]


@pytest.fixture(scope="session")
def planted(tmp_path_factory: pytest.TempPathFactory) -> PlantedRuns:
    return PlantedRuns(tmp_path_factory.mktemp("planted"))


@pytest.fixture
def gate(tmp_path: Path, planted: PlantedRuns) -> Iterator[Gate]:
    """Return a function that compares a model and returns the exit code and the content of the JSON file."""

    def compare(
        source: Path,
        *overrides: str,
        against: str | Path = BASE,
        config: Path | None = None,
        margin: float = 0.01,
        general: Path | None = planted.general,
    ) -> tuple[int, dict]:
        code = evaluate_against(
            source,
            against=str(against),
            step=None,
            config=config,
            overrides=overrides,
            options=GateOptions(
                margin=margin,
                max_forgetting=0.3,
                general=general,
                json=tmp_path / "gate.json",
            ),
        )
        forget()
        return code, read_result(tmp_path / "gate.json")

    yield compare
    forget()
