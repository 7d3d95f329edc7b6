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
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from finetune.checkpoint.sharding.access import state_layout
from finetune.model.tensor_parallel import _split_parameter
from finetune.runtime.parallel import open_tensor_groups

GROUP = 2


def numbered_model() -> nn.Module:
    """Return a model whose elements are their own positions; its shards are uneven."""
    packed = nn.Module()
    packed.matrix, packed.experts = nn.Parameter(torch.empty(20, 3)), nn.Parameter(torch.empty(3, 8, 2))
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3), nn.LayerNorm(3), packed)
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
    return model


def held_by(place: tuple[int, int, int]) -> dict[str, tuple[list[int], list[float], bool]]:
    """Return by name what a rank holds: positions by its range, values, and whether they are copies."""
    rank, copies, shards = place
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=copies * shards * GROUP)
    mesh = init_device_mesh("cpu", (copies, shards, GROUP), mesh_dim_names=("copies", "shards", "tp"))
    open_tensor_groups(GROUP, device_type="cpu", mesh=mesh)
    model = numbered_model()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}, src_data_rank=None)
    for name, dimension in (("matrix", 0), ("experts", 1)):
        _split_parameter(model[3], name, mesh["tp"], _StridedShard(dimension, split_factor=2))
    fully_shard(model, mesh=mesh["copies", "shards"] if copies > 1 else mesh["shards"])
    held = {}
    for name, shard in state_layout(model).shards.items():
        own = shard.range
        rows = torch.arange(own.start * own.width, own.stop * own.width)
        held[name] = (own.of(rows).tolist(), shard.local_view(shard.tensor).tolist(), shard.is_copy)
        sent = [part.of(torch.arange(part.start * part.width, part.stop * part.width)) for part in own.rectangles()]
        assert [position for part in sent for position in part.tolist()] == held[name][0]
    return held


@pytest.mark.parametrize(("copies", "shards"), [(2, 2), (1, 3), pytest.param(1, 16, marks=pytest.mark.full)])
def test_ranks_send_every_element_of_shards_of_split_layers_once(copies: int, shards: int) -> None:
    places = [(rank, copies, shards) for rank in range(copies * shards * GROUP)]
    context = multiprocessing.get_context("forkserver")  # of no process that has groups of its own
    context.set_forkserver_preload([__name__])
    with context.Pool(1, maxtasksperchild=1) as processes:  # a mesh outlives its group
        ranks = processes.map(held_by, places, chunksize=1)
    sent: Counter[tuple[str, int]] = Counter()
    for held in ranks:
        for name, (positions, values, is_copy) in held.items():
            assert positions == values
            sent.update((name, position) for position in positions if not is_copy)
    whole = numbered_model().named_parameters()
    assert sent == {(name, position): 1 for name, parameter in whole for position in range(parameter.numel())}
