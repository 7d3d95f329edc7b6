"""Every workaround that a strategy needs for Accelerate, DeepSpeed, torch and transformers.

Each names the issue or the source line upstream. `CHECKED_WITH` has the newest versions with which each was found
necessary and right; a test fails with a newer version, and one for each workaround when it is no longer needed.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers.integrations import unset_hf_deepspeed_config

from finetune.errors import StrategyError
from finetune.runtime.parameters import NOT_YET_UNFROZEN, full_numel
from finetune.strategy.gradient_sync import fsdp2_plugin

CHECKED_WITH: Mapping[str, str] = {
    "accelerate": "1.15",
    "deepspeed": "0.19",
    "torch": "2.14",
    "transformers": "5.24",
}

# --- Accelerate: FSDP and DeepSpeed on a machine without an accelerator


def use_cpu_devices() -> None:
    """Have Accelerate and DeepSpeed take the CPU for their device; call it before either looks for one."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"


@contextmanager
def gloo_bridge(timeout: timedelta | None = None) -> Iterator[None]:
    """Have the Accelerator that is built meanwhile run FSDP or DeepSpeed on CPUs, over gloo with this timeout.

    With `cpu=True` Accelerate silently builds plain DDP for both, and without it no process group at all: every rank
    would train a copy of its own (`PartialState._prepare_backend`, accelerate 1.15). So the state of the process is
    made first, with gloo for its backend, and called distributed as on GPUs, which is what FSDP asks for.
    """
    use_cpu_devices()
    state = PartialState(backend="gloo", **({} if timeout is None else {"timeout": timeout}))
    if state.distributed_type == DistributedType.NO:
        state.distributed_type = DistributedType.MULTI_GPU
    yield


# --- Accelerate: sequence and tensor parallelism

_SEQUENCE_SIZE, _TENSOR_SIZE = "PARALLELISM_CONFIG_SP_SIZE", "PARALLELISM_CONFIG_TP_SIZE"
_USES_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"


@contextmanager
def without_accelerate_parallelism() -> Iterator[None]:
    """Have the Accelerator that is built meanwhile know nothing of the groups of ranks that share rows or weights.

    Its only kind of sequence parallelism is DeepSpeed's, with batches of its own making and a loss that the caller
    averages (`ParallelismConfig`, `DeepSpeedSequenceParallelConfig` in accelerate 1.15); its ring attention drops masks
    (accelerate#4177). Ours is in the attention (`model/attention/implementation.py`). Its tensor parallelism wants a
    model that transformers has split while loading it; ours is `model/tensor_parallel.py`.
    """
    sizes = (_SEQUENCE_SIZE, _TENSOR_SIZE)
    if all(int(os.environ.get(name, "1")) == 1 for name in sizes):
        yield
        return
    hidden = {name: os.environ.pop(name) for name in (*sizes, _USES_PARALLELISM) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def without_accelerate_splitting(accelerator: Accelerator) -> Iterator[None]:
    """Have Accelerate prepare for FSDP2 a model whose layers are split already; its mesh knows the groups.

    For every whole parameter of such a model it imports `ReplicateParallel`, which transformers 5.23 no longer has
    (`_prepare_tp` in accelerate 1.15). Whole parameters stay plain here, as the layers that read them expect.
    """
    sizes = accelerator.parallelism_config
    if sizes is None or sizes.tp_size == 1:
        yield
        return
    size, sizes.tp_size = sizes.tp_size, 1
    try:
        yield
    finally:
        sizes.tp_size = size


# --- Accelerate: FSDP2


@contextmanager
def broadcast_rank_0_buffers(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """Have Accelerate prepare a model with saved buffers under FSDP2; afterwards every rank has rank 0's. Collective.

    With `fsdp_cpu_ram_efficient_loading` only rank 0 has loaded BART's biases or a batch norm's statistics. Accelerate
    takes every tensor of the state for a DTensor, and a buffer has no `device_mesh` (accelerate#3898, open in 1.15);
    buffers that are not saved it leaves alone.
    """
    plugin = fsdp2_plugin(accelerator)
    if plugin is None or not plugin.cpu_ram_efficient_loading:
        yield
        return
    _require_internals(model, "_non_persistent_buffers_set", package="torch")
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
    """Have Accelerate prepare a model for FSDP2 without float32 copies of its trained parameters.

    It makes them whenever mixed precision is on (accelerate#2674, `fsdp2_prepare_model` in 1.15), which is right unless
    the optimizer rounds stochastically. The plugin's own policy still says in which type is computed.
    """
    if not is_wanted or fsdp2_plugin(accelerator) is None:
        yield
        return
    state = accelerator.state
    _require_internals(state, "_mixed_precision", package="accelerate")
    precision, state._mixed_precision = state._mixed_precision, "no"
    try:
        yield
    finally:
        state._mixed_precision = precision


def widen_unfilled_parameters(accelerator: Accelerator, model: nn.Module) -> None:
    """Give trained parameters that have no values yet unwritten float32 memory, where Accelerate would cast them.

    Under mixed precision it casts every trained parameter, also on the ranks that are sent their values later
    (`fsdp2_prepare_model` in 1.15). A cast writes: 4 bytes of real memory per parameter on each of these ranks, 256 GB
    for 8 billion on 8 of them. Call it on such a rank, just before the model is prepared. What trained parameters have
    for values is lost: rank 0's are sent.
    """
    if fsdp2_plugin(accelerator) is None or accelerator.mixed_precision == "no":
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)


def prefetch_fsdp2_layers(accelerator: Accelerator, model: nn.Module) -> None:
    """Have each layer under FSDP2 ask for the next one's parameters before it computes; the model is prepared.

    Accelerate refuses `forward_prefetch` for FSDP2 (`FullyShardedDataParallelPlugin.__post_init__`, 1.15), so the
    launcher's `fsdp_forward_prefetch: true` is carried out here; one more layer is unsharded at a time. Without it the
    host asks when it comes to a layer, which is early enough unless the host is the slower of the two. Only layers of
    one list ask for one another: what was asked for and not used would outlive the next update.
    """
    plugin = fsdp2_plugin(accelerator)
    if plugin is None or not plugin.forward_prefetch:
        return
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for layer, following in pairwise(layer for layer in layers if isinstance(layer, FSDPModule)):
                layer.set_modules_to_forward_prefetch([following])


# --- DeepSpeed: a second engine in one process


def reset_deepspeed() -> None:
    """Have DeepSpeed, if it is imported, forget the process groups of an engine; the next one makes its own.

    It keeps them in globals and goes on using groups that are destroyed (`cdb` in comm/comm.py, utils/groups.py, 0.19).
    """
    unset_hf_deepspeed_config()
    comm, groups = (sys.modules.get(name) for name in ("deepspeed.comm.comm", "deepspeed.utils.groups"))
    if comm is None or groups is None:
        return
    _require_internals(comm, "cdb", package="deepspeed")
    _require_internals(groups, "_WORLD_GROUP", package="deepspeed")
    comm.cdb = None  # type: ignore[attr-defined]
    for name, value in list(vars(groups).items()):
        if name.isupper() and isinstance(value, dict):
            value.clear()
        elif name in ("mesh_device", "mpu") or (name.isupper() and name.endswith(("_GROUP", "_SIZE", "_RANK"))):
            setattr(groups, name, None)


# --- torch: process groups


def set_default_group_timeout(timeout: timedelta) -> None:
    """Give this timeout to every process group that is made without one from now on.

    `new_group` and `init_device_mesh` take a constant then, not the default group's timeout: 10 minutes for NCCL
    (`_get_default_timeout` in torch/distributed/distributed_c10d.py, 2.11 to 2.13). DeepSpeed reduces gradients over
    such a group (`_clone_world_group` in utils/groups.py, 0.19), and HSDP over its mesh's.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        _require_internals(distributed_c10d, name, package="torch")
        setattr(distributed_c10d, name, timeout)


# --- torch: DDP


def warm_up_ddp_buckets(accelerator: Accelerator, model: nn.Module, *, loss: Callable[[], Tensor]) -> None:
    """Have DDP rebuild its buckets now, by two backward passes whose gradients are dropped; no other model changes.

    DDP rebuilds them once, in the order in which the first backward pass made the gradients (pytorch#35137,
    `Reducer::rebuild_buckets`). Above two ranks the sum over ranks is rounded by a number's place in its bucket, so
    without this the first step after a resume would differ in the last bit from that of the uninterrupted run.

    Call it before the state is loaded, which restores what a forward pass changes (the statistics of norms), and only
    where at least one step has been taken: the first step of all has the first buckets. Collective.
    """
    if not isinstance(model, DistributedDataParallel):
        return
    for _ in range(2):  # the second forward pass rebuilds them
        accelerator.backward(loss())
    for parameter in model.parameters():
        parameter.grad = None


def keep_ddp_buffers_local(model: nn.Module) -> None:
    """Have DDP leave buffers alone in forward passes: by default it sends rank 0's before each (torch 2.13).

    No model here needs it: the running statistics of batch norms are summed when they are read
    (`model/batch_norm.py`), and what else is a buffer is constant, as `inv_freq`, or follows from the rank's own batch,
    as with dynamic rotary embeddings. DDP has sent all of them once when it was built. Other models are left alone.
    """
    if isinstance(model, DistributedDataParallel):
        model.broadcast_buffers = False


# --- DeepSpeed

MIN_BUCKET_NUMEL = 25 * 2**20 // 4
"""Numbers of a bucket that is worth a message: DDP's 25 MiB in float32."""


def complete_zero_config(accelerator: Accelerator, model: nn.Module) -> None:
    """Fill in what the DeepSpeed config leaves out or calls `auto`, before the model is prepared.

    DeepSpeed's own buckets have half a billion numbers for any model, stages 1 and 2 reduce them after the backward
    pass instead of during it (`runtime/zero/config.py`, 0.19), and `auto` is only known to transformers' Trainer.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    zero = plugin.deepspeed_config["zero_optimization"]
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    num_trained = sum(full_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)
    sizes = zero_bucket_sizes(
        num_trained=num_trained, width=width if isinstance(width, int) else 0, stage=zero["stage"]
    )
    settings = {**sizes, "overlap_comm": True}
    zero.update({name: value for name, value in settings.items() if zero.get(name, "auto") == "auto"})


def zero_bucket_sizes(*, num_trained: int, width: int, stage: int) -> Mapping[str, int]:
    """Return the sizes in numbers, by DeepSpeed's names.

    A bucket is reduced while the backward pass continues: it holds about one matrix of the model (as with Trainer), in
    a small model enough to be worth a message, and never more than the model has.
    """
    bucket = max(1, min(max(width * width, MIN_BUCKET_NUMEL), num_trained))
    sizes = {"reduce_bucket_size": bucket}
    if stage == 3 and width:
        sizes |= {"stage3_prefetch_bucket_size": int(0.9 * bucket), "stage3_param_persistence_threshold": 10 * width}
    return sizes


def reduce_zero_buckets_in_place(accelerator: Accelerator) -> None:
    """Have ZeRO-1 and -2 all-reduce each bucket in place; call it before the model is prepared.

    By default (`reduce_scatter: true`) DeepSpeed copies the whole bucket, all-reduces the copy and copies this rank's
    share back (`allreduce_and_copy_with_multiple_ranks`, 0.19): nothing less is sent, and another bucket of memory is
    needed. `prescale_gradients` keeps its order, to divide before it adds up, so that no number changes. A DeepSpeed
    config that says anything on how gradients are reduced is left alone, and so is an offloaded optimizer.
    """
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is None:
        return
    config = plugin.deepspeed_config
    zero = config["zero_optimization"]
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    is_plain = zero.get("contiguous_gradients", True) and not _REDUCTION_KEYS & {*config, *zero}
    if zero["stage"] in (1, 2) and is_plain and not offloads:
        zero["reduce_scatter"] = False
        config["prescale_gradients"] = True


_REDUCTION_KEYS = {
    "reduce_scatter",
    "use_multi_rank_bucket_allreduce",
    "prescale_gradients",
    "gradient_predivide_factor",
}


def deepspeed_engine(accelerator: Accelerator) -> Any:
    """Return the engine under DeepSpeed, which also updates the weights in the last backward pass of a step; else None.

    Accelerate keeps it in an attribute that other strategies do not have (`deepspeed_engine_wrapped`, 1.15).
    """
    return getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def complete_gradients(accelerator: Accelerator, model: nn.Module, *, divisor: float = 1.0) -> None:
    """Complete the gradients of a step of several calls, each reduced at its end, and divide them by `divisor`.

    DeepSpeed's engine must know at the last backward pass of a step that it is the last; where that is not known, it is
    made up for as its own mode without a count does it (`managed_gradient_accumulation: false`, `engine.step`, 0.19).
    It clips and updates the weights here, and divides meanwhile, by what it takes for the loss scale. Raises
    StrategyError for an optimizer of DeepSpeed that has no such scale. Collective.
    """
    engine = deepspeed_engine(accelerator)
    if engine is None:
        for parameter in model.parameters() if divisor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        return
    zero = engine.optimizer
    if divisor != 1.0 and not hasattr(zero, "external_loss_scale"):
        raise StrategyError(
            f"DeepSpeed's {type(zero).__name__} takes one group of rows per step. Pass all rows of a step at once, or "
            "launch ZeRO-2 or FSDP2."
        )
    engine.set_gradient_accumulation_boundary(True)
    if engine.zero_optimization_partition_gradients():
        _require_internals(zero, "finalize_gradient_accumulation_boundary", package="deepspeed")
        zero.finalize_gradient_accumulation_boundary()
    else:
        engine.allreduce_gradients()
    if divisor == 1.0:
        engine.step()
        return
    zero.external_loss_scale, zero.custom_loss_scaler = divisor * zero.loss_scale, True
    try:
        engine.step()
    finally:
        zero.external_loss_scale, zero.custom_loss_scaler = None, False


def drop_not_yet_unfrozen_from_zero_norm(model: Any) -> None:
    """Have ZeRO's gradient norm leave out parameter groups that are not yet unfrozen; other models are left alone.

    Elsewhere their gradients are dropped before the norm is taken. ZeRO computes the norm, clips and steps in one call,
    from buffers of its own (`averaged_gradients`, DeepSpeed 0.19); these are set to zero first. Raises StrategyError
    for a kind of ZeRO whose gradients are elsewhere.
    """
    zero = getattr(model, "optimizer", None) if hasattr(model, "zero_optimization_stage") else None
    if zero is None:
        return
    if not hasattr(zero, "averaged_gradients"):
        raise StrategyError(
            f"train.unfreeze is not supported under DeepSpeed's {type(zero).__name__}. Launch ZeRO-2 or FSDP2."
        )
    step = zero.step

    def step_without_frozen(*values: Any, **settings: Any) -> Any:
        group_of = getattr(zero, "sub_group_to_group_id", None)  # ZeRO-3 splits groups into smaller ones
        for number, gradients in zero.averaged_gradients.items():
            group = zero.optimizer.param_groups[number if group_of is None else group_of[number]]
            for gradient in (gradients or ()) if group.get(NOT_YET_UNFROZEN) else ():
                gradient.zero_()
        return step(*values, **settings)

    zero.step = step_without_frozen


# --- transformers

_BROADCASTS = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def unsharded(accelerator: Accelerator) -> Iterator[None]:
    """Have transformers load models meanwhile as if this process were alone: whole on every rank.

    Under ZeRO-3 `from_pretrained` would partition every parameter, and under FSDP leave ranks without values: both are
    read from global state (`is_deepspeed_zero3_enabled`, `is_fsdp_enabled` in transformers 5.23).
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


def _require_internals(owner: object, name: str, *, package: str) -> None:
    """Raise StrategyError where a package no longer has the attribute that a workaround changes."""
    if not hasattr(owner, name):
        owner_name = getattr(owner, "__name__", type(owner).__name__)
        raise StrategyError(
            f"{package} {version(package)} is not supported yet: {owner_name}.{name} is missing. "
            f"Install {package} {CHECKED_WITH[package]}."
        )
