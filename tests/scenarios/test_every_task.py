"""Every task trains alike under every strategy, and what it exports gives the metric of its last evaluation again.

The jobs of one strategy share a launch. By default each strategy takes one variant of each job; the slow tier takes
all the others.
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.task_cases import CASES
from tests.task_cases.runs import launch, prepare

pytestmark = [pytest.mark.distributed, pytest.mark.full, pytest.mark.timeout(1800)]

VARIANT = {"ddp": "full", "fsdp2": "lora", "zero2": "lora", "zero3": "full"}

ALSO = {("sft", "zero3"): "lora"}
"""Adapters of a model that is split over ranks are those that peers have saved as empty tensors."""


def variant_of(case, strategy: str) -> str:
    """Return the variant that the strategy takes of the case by default: its only one, where there are not both."""
    chosen = ALSO.get((case.name, strategy), VARIANT[strategy])
    return chosen if chosen in case.variants else next(iter(case.variants))


def is_slow(case, variant: str, strategy: str) -> bool:
    """Tell whether the run is left to the slow tier."""
    return case.is_extra or variant != variant_of(case, strategy)


RUNS = [
    pytest.param(
        *(case, variant, strategy),
        id=f"{case.name}-{variant}-{strategy}",
        marks=[pytest.mark.slow] if is_slow(case, variant, strategy) else [],
    )
    for strategy in VARIANT
    for case in CASES
    for variant in case.variants
    if (variant, strategy) not in case.exempt
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("tasks")
    prepare([case for case in CASES if not case.is_extra], place)
    return place


@pytest.fixture(scope="module")
def runs(folder):
    """The runs of a strategy (`single`: one process) in a tier, by case and variant; each tier is launched once."""
    launched = {}

    def of(strategy: str, *, slow: bool):
        if (strategy, slow) not in launched:
            if slow:
                prepare([case for case in CASES if not (folder / case.name).exists()], folder)
            tier = [run.values for run in RUNS if is_slow(*run.values) is slow]
            wanted = {
                (case.name, variant): (case, variant) for case, variant, name in tier if strategy in ("single", name)
            }
            name = f"{strategy}-slow" if slow else strategy
            chosen = None if strategy == "single" else strategy
            launched[strategy, slow] = launch(chosen, list(wanted.values()), folder, name=name)
        return launched[strategy, slow]

    return of


@pytest.mark.parametrize(("case", "variant", "strategy"), RUNS)
def test_a_task_trains_the_same_on_two_processes_and_its_export_has_the_same_metrics(
    runs, folder, case, variant, strategy
):
    slow = is_slow(case, variant, strategy)
    alone, spread = (runs(name, slow=slow)[case.name, variant] for name in ("single", strategy))
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
        load_file(runs(name, slow=False)["sft", "lora"].final / "adapter_model.safetensors")
        for name in ("single", strategy)
    )
    assert len(alone) == 2 * 14
    assert alone.keys() == spread.keys()
    for name, expected in alone.items():
        assert spread[name].numel() > 0
        assert spread[name].shape == expected.shape
        assert torch.allclose(spread[name], expected, rtol=1e-4, atol=1e-5), name
