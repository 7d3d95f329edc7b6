"""Every task trains alike under every strategy, and what it exports gives the metric of its last evaluation again.

The jobs of one strategy share a launch. Here each strategy takes one variant of each; `benchmarks/task_matrix.py` takes
all of them.
"""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # for the cases, which the table there has in common with these tests
from task_cases import CASES  # noqa: E402
from task_runs import launch, prepare  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(1800)]

VARIANT = {"ddp": "full", "fsdp2": "lora", "zero2": "lora", "zero3": "full"}

ALSO = {("sft", "zero3"): "lora"}
"""Adapters of a model that is split over ranks are those that peers have saved as empty tensors."""


def variant_of(case, strategy: str) -> str:
    """Return the variant that the strategy takes of the case: its only one, where there are not both."""
    chosen = ALSO.get((case.name, strategy), VARIANT[strategy])
    return chosen if chosen in case.variants else next(iter(case.variants))


RUNS = [
    (case, variant_of(case, strategy), strategy)
    for strategy in VARIANT
    for case in CASES
    if not case.is_extra and (variant_of(case, strategy), strategy) not in case.exempt
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tasks")
    prepare([case for case in CASES if not case.is_extra], place)
    return place


@pytest.fixture(scope="module")
def runs(folder):
    """What the cases have left behind, by strategy (`single`: one process), case and variant; each launched once."""
    launched = {}

    def of(strategy: str):
        if strategy not in launched:
            wanted = [(case, variant) for case, variant, name in RUNS if strategy in ("single", name)]
            unique = list({(case.name, variant): (case, variant) for case, variant in wanted}.values())
            launched[strategy] = launch(None if strategy == "single" else strategy, unique, folder)
        return launched[strategy]

    return of


@pytest.mark.parametrize(("case", "variant", "strategy"), RUNS, ids=[f"{c.name}-{v}-{s}" for c, v, s in RUNS])
def test_a_task_learns_alike_and_exports_what_it_has_measured(runs, folder, case, variant, strategy):
    alone, spread = runs("single")[case.name, variant], runs(strategy)[case.name, variant]
    assert spread.error is None
    assert len(alone.losses) >= 3
    assert spread.losses == pytest.approx(alone.losses, rel=1e-4)
    assert spread.metrics[case.metric] == pytest.approx(alone.metrics[case.metric], rel=1e-4, abs=1e-6)
    again = case.reload(spread.final, folder / case.name)
    assert again == pytest.approx(spread.metrics[case.metric], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_an_adapter_of_a_split_model_is_saved_as_that_of_one_process_is(runs, strategy):
    """The 40-byte adapter cannot happen (trl#4416, peft#2892)."""
    alone, spread = (
        load_file(runs(name)["sft", "lora"].final / "adapter_model.safetensors") for name in ("single", strategy)
    )
    assert len(alone) == 2 * 14
    assert alone.keys() == spread.keys()
    for name, expected in alone.items():
        assert spread[name].numel() > 0
        assert spread[name].shape == expected.shape
        assert torch.allclose(spread[name], expected, rtol=1e-4, atol=1e-5), name
