"""All ranks accumulate gradients alike: by the memory of the rank that has least."""

from types import SimpleNamespace

import pytest
import torch

from finetune.run.setup import optimizer
from finetune.run.setup.optimizer import free_device_bytes, plan_accumulation
from finetune.strategy.gradient_sync import GradientReduction

GB = 10**9
CPU = torch.device("cpu")


def arguments_of(reduction=GradientReduction.EITHER, **settings):
    log = []
    strategy = SimpleNamespace(
        reduction=lambda: reduction, expected=lambda: SimpleNamespace(num_processes=8), name="fsdp2"
    )
    config = SimpleNamespace(
        run=SimpleNamespace(deterministic=settings.get("deterministic", False)),
        train=SimpleNamespace(microbatch_size=1, optimizer=SimpleNamespace(stochastic_rounding=False)),
    )
    return {"config": config, "strategy": strategy, "log": log.append}, log


@pytest.mark.parametrize(("least", "reduces"), [(80, False), (79, True)])
def test_the_rank_with_the_least_memory_decides_for_all(monkeypatch, least, reduces):
    monkeypatch.setattr(optimizer.distributed, "gather_objects", lambda own: [130 * GB, least * GB, 120 * GB])
    arguments, lines = arguments_of()
    accumulation = plan_accumulation(**arguments, device=CPU, num_trained=8 * GB, num_batches=4, planned_bytes=16 * GB)
    assert accumulation.reduces_every_microbatch == reduces
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("reduction", "num_batches"),
    [(GradientReduction.LAST, 4), (GradientReduction.EVERY, 4), (GradientReduction.EITHER, 1)],
)
def test_free_memory_is_not_gathered_if_the_gradient_reduction_is_fixed(monkeypatch, reduction, num_batches):
    monkeypatch.setattr(optimizer.distributed, "gather_objects", None)
    arguments, lines = arguments_of(reduction)
    plan_accumulation(**arguments, device=CPU, num_trained=8 * GB, num_batches=num_batches, planned_bytes=0)
    assert lines == []


def test_ranks_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(optimizer, "available_bytes", lambda: 64 * GB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert free_device_bytes(CPU) == 8 * GB
    monkeypatch.setattr(optimizer.torch, "get_device_module", lambda _: SimpleNamespace(mem_get_info=lambda _: (5, 9)))
    assert free_device_bytes(torch.device("cuda")) == 5
    monkeypatch.setattr(optimizer.torch, "get_device_module", lambda _: SimpleNamespace())
    assert free_device_bytes(torch.device("mps")) == 0
