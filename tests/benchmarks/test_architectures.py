"""No architecture fails after its training, and none is exported otherwise than it was trained; see the script."""

import pytest

from benchmarks import architectures

pytestmark = [pytest.mark.full, pytest.mark.distributed, pytest.mark.timeout(3600)]


def failures_of(folder, names, *, strategies, variants=tuple(architectures.VARIANTS)):
    table, failures = architectures.run(folder, names, strategies=strategies, variants=variants)
    assert table.count("verified, ") + len(failures) == len(names) * len(strategies) * len(variants), table
    return failures


def test_a_dense_model_and_a_mixture_of_experts_are_verified(tmp_path):
    assert failures_of(tmp_path, ["qwen2", "mixtral"], strategies=["single"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_export_of_every_architecture_is_verified(tmp_path, strategy):
    assert len(architectures.ARCHITECTURES) == 24
    assert failures_of(tmp_path, list(architectures.ARCHITECTURES), strategies=["single", strategy]) == []
