"""Whatever lies in a job file, in rows, on the disk or in a model folder, a command ends as it should.

2,000 cases in all (FINETUNE_FUZZ_CASES), the same ones every time; FINETUNE_FUZZ_SEED draws others.
"""

import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.cases import Case, Ground
from tests.fuzz.strategies import kinds

NUM_CASES = int(os.environ.get("FINETUNE_FUZZ_CASES", "2000"))
SEED = int(os.environ.get("FINETUNE_FUZZ_SEED", "0"))
NAMES = (
    "job structures",
    "job texts",
    "overrides",
    "rows",
    "files",
    "templates",
    "checkpoints",
    "prepared sets",
    "models",
    "hostile models",
    "pages",
    "continued",
    "streams",
    "sweeps",
    "images",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", NAMES)
def test_every_case_ends_with_0_or_2_and_one_message(name: str, ground: Ground):
    share, strategy = kinds(ground)[name]
    num_run = 0

    @seed(SEED)
    @settings(
        max_examples=NUM_CASES * share // 100,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def every_case(case: Case) -> None:
        nonlocal num_run
        num_run += 1
        violation = ground.violation(case)
        assert violation is None, f"{violation}\nKeep it in tests/fuzz/findings:\n{case.to_json()}"

    every_case()
    assert num_run >= NUM_CASES * share // 100 * 0.9  # hypothesis may know that there are no more


def test_every_kind_has_its_share(ground: Ground):
    shares = {name: share for name, (share, _) in kinds(ground).items()}
    assert tuple(shares) == NAMES
    assert sum(shares.values()) == 100
