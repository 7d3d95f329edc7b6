"""Which elements of a model a rank holds under FSDP2 over groups of ranks that have split its layers."""

import multiprocessing
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.checkpoint.sharding.access import state_layout
from finetune.runtime.parallel import open_tensor_groups

SHARDS, GROUP = 2, 2


def numbered_model() -> nn.Module:
    """Return a model whose elements are their own positions; its shards are uneven."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3), nn.LayerNorm(3))
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
    return model


def held_by(place: tuple[int, int]) -> dict[str, tuple[list[int], list[float], bool]]:
    """Return by name what a rank holds: positions by its range, values, and whether they are copies."""
    rank, copies = place
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=copies * SHARDS * GROUP)
    mesh = init_device_mesh("cpu", (copies, SHARDS, GROUP), mesh_dim_names=("copies", "shards", "tp"))
    open_tensor_groups(GROUP, device_type="cpu", mesh=mesh)
    model = numbered_model()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
    fully_shard(model, mesh=mesh["copies", "shards"] if copies > 1 else mesh["shards"])
    held = {}
    for name, shard in state_layout(model).shards.items():
        own = shard.range
        rows = torch.arange(own.start * own.width, own.stop * own.width)
        held[name] = (own.of(rows).tolist(), shard.local_view(shard.tensor).tolist(), shard.is_copy)
    return held


@pytest.mark.parametrize("copies", [1, 2])
def test_ranks_send_every_element_of_shards_of_split_layers_once(copies: int) -> None:
    places = [(rank, copies) for rank in range(copies * SHARDS * GROUP)]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as processes:  # a mesh outlives its group
        ranks = processes.map(held_by, places, chunksize=1)
    sent: Counter[tuple[str, int]] = Counter()
    for held in ranks:
        for name, (positions, values, is_copy) in held.items():
            assert positions == values
            sent.update((name, position) for position in positions if not is_copy)
    whole = numbered_model().named_parameters()
    assert sent == {(name, position): 1 for name, parameter in whole for position in range(parameter.numel())}
