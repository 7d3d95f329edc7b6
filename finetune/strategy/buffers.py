"""Buffers of a model that rank 0 alone has loaded: BART's biases, a batch norm's statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn


@contextmanager
def buffers_from_rank_0(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Have Accelerate prepare a model with saved buffers under FSDP2; afterwards every rank has rank 0's. Collective.

    With `fsdp_cpu_ram_efficient_loading` Accelerate takes every tensor of the state for a split one, and an unsplit
    buffer has no `device_mesh` (accelerate 1.15); buffers that are not saved it leaves alone. May go when that is
    mended.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 2 or not plugin.cpu_ram_efficient_loading:
        yield
        return
    saved = [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    norms = [module for module in model.modules() if getattr(module, "track_running_stats", False)]
    for norm in norms:  # a batch norm would ask for `num_batches_tracked` when the state is loaded
        norm.__dict__["track_running_stats"] = False
    for module, name in saved:
        module._non_persistent_buffers_set.add(name)
    yield
    for norm in norms:
        norm.__dict__["track_running_stats"] = True
    for module, name in saved:
        module._non_persistent_buffers_set.discard(name)
        torch.distributed.broadcast(module.get_buffer(name), src=0)
