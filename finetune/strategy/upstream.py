"""Every workaround that a strategy needs for Accelerate, DeepSpeed and torch.

Each has a test that fails when it is no longer needed.

The gloo bridge lets FSDP and DeepSpeed run on a machine without an accelerator. With `cpu=True` Accelerate silently
builds plain DDP for both, and without it no process group at all; every rank would then train a copy of its own. One
private function of Accelerate decides, and only that one is replaced, while the Accelerator is built. Seen with
Accelerate 1.15.0.

Parameter groups that are not yet unfrozen have no part in the gradient norm that ZeRO computes. Elsewhere their
gradients are dropped before the norm is taken; ZeRO takes the norm, clips and steps in one, from buffers of its own,
which are set to zero first. Seen with DeepSpeed 0.19.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.integrations import unset_hf_deepspeed_config

from finetune.errors import StrategyError
from finetune.runtime.parameters import NOT_YET_UNFROZEN, full_numel
from finetune.strategy.gradient_sync import fsdp2_plugin


@contextmanager
def gloo_bridge() -> Iterator[None]:
    """Make Accelerate set up gloo and the CPU for a strategy that it only knows on GPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    with patch.object(PartialState, "_prepare_backend", _gloo):
        yield


def _gloo(*_: object, **__: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


_BROADCASTS = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def unsharded(accelerator: Accelerator) -> Iterator[None]:
    """Have transformers load models meanwhile as if this process were alone.

    Under ZeRO-3 `from_pretrained` would partition every parameter, under FSDP leave ranks without values.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    broadcasts = os.environ.pop(_BROADCASTS, None)
    if plugin is not None:
        unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if plugin is not None:
            plugin.set_deepspeed_weakref()
        if broadcasts is not None:
            os.environ[_BROADCASTS] = broadcasts


@contextmanager
def broadcast_rank_0_buffers(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
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


@contextmanager
def keep_bf16_parameters(accelerator: Accelerator, *, is_wanted: bool) -> Iterator[None]:
    """Have Accelerate prepare a model for FSDP2 without float32 copies of its weights.

    It makes them whenever it is told of mixed precision (`fsdp2_prepare_model`, accelerate 1.15), which is right unless
    the optimizer rounds by chance. The plugin's own policy still says what is computed with.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not is_wanted or plugin is None or plugin.fsdp_version != 2:
        yield
        return
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (kind,), {"mixed_precision": "no"})
    try:
        yield
    finally:
        accelerator.__class__ = kind


def prefetch_fsdp2_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """Have each layer under FSDP2 ask for the next one's parameters before it computes; the model is prepared.

    Without it the host asks when it comes to a layer, which is early enough unless the host is the slower of the two.
    It is done where `fsdp_forward_prefetch: true` says so, and holds one more layer whole. Only layers of one list ask
    for one another: what was asked for and not used would still be there, as it was, after the weights have changed.
    """
    plugin = fsdp2_plugin(accelerator)
    if plugin is None or not plugin.forward_prefetch:
        return
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for layer, following in pairwise(each for each in layers if isinstance(each, FSDPModule)):
                layer.set_modules_to_forward_prefetch([following])


MIN_BUCKET_NUMEL = 25 * 2**20 // 4
"""Numbers of a bucket that is worth a message: DDP's 25 MiB in float32."""


def set_zero_bucket_sizes(accelerator: Accelerator, model: nn.Module) -> None:
    """Fill in the sizes that the DeepSpeed config leaves out or calls `auto`; call it before the model is prepared."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    zero = plugin.deepspeed_config["zero_optimization"]
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    num_trained = sum(full_numel(each) for each in model.parameters() if each.requires_grad)
    found = zero_bucket_sizes(
        num_trained=num_trained, width=width if isinstance(width, int) else 0, stage=zero["stage"]
    )
    zero.update({name: size for name, size in found.items() if zero.get(name, "auto") == "auto"})


def zero_bucket_sizes(*, num_trained: int, width: int, stage: int) -> Mapping[str, int]:
    """Return the sizes in numbers, by DeepSpeed's names.

    A bucket is reduced while the backward pass goes on: it holds about a matrix of the model (Trainer's choice too), in
    a small model as much as makes a message worth while, and never more than there is.
    """
    bucket = max(1, min(max(width * width, MIN_BUCKET_NUMEL), num_trained))
    sizes = {"reduce_bucket_size": bucket}
    if stage == 3 and width:
        sizes |= {"stage3_prefetch_bucket_size": int(0.9 * bucket), "stage3_param_persistence_threshold": 10 * width}
    return sizes


def drop_not_yet_unfrozen_from_zero_norm(model: Any) -> None:
    """Have the prepared model's gradient norm be of the groups that learn; does nothing unless ZeRO takes it.

    Raises StrategyError for a kind of ZeRO whose gradients lie somewhere else.
    """
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    if zero is None:
        return
    if not hasattr(zero, "averaged_gradients"):
        raise StrategyError(f"train.unfreeze: not under DeepSpeed's {type(zero).__name__}. Launch ZeRO-2 or fsdp2.")
    step = zero.step

    def step_of_learning(*values: Any, **settings: Any) -> Any:
        for gradient in _not_yet_unfrozen_gradients(zero):
            gradient.zero_()
        return step(*values, **settings)

    zero.step = step_of_learning


def _not_yet_unfrozen_gradients(zero: Any) -> Iterator[Tensor]:
    group_of = getattr(zero, "sub_group_to_group_id", None)  # ZeRO-3 cuts groups into smaller ones
    for number, gradients in zero.averaged_gradients.items():
        group = zero.optimizer.param_groups[number if group_of is None else group_of[number]]
        if group.get(NOT_YET_UNFROZEN):
            yield from gradients or ()
