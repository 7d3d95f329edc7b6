"""Builds the Accelerator that a strategy requests, and checks the one that Accelerate built."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader

from finetune.data.batch import Batch
from finetune.errors import StrategyError
from finetune.registry.model_choices import ARITHMETIC
from finetune.runtime import distributed
from finetune.runtime.parallel import open_sequence_groups, open_tensor_groups, sequence_group, tensor_group
from finetune.strategy.protocol import ExpectedSetup, Strategy
from finetune.strategy.upstream import set_default_group_timeout, without_accelerate_parallelism


def build_accelerator(strategy: Strategy, *, precision: str, timeout: timedelta) -> Accelerator:
    """Return the Accelerator of the strategy; raises StrategyError if Accelerate built another one. Collective.

    `timeout` is that of every process group over which tensors are sent. Accelerate's own accumulation stays at 1: the
    step sets the boundary, from the number of targets.
    """
    set_default_group_timeout(timeout)
    with (
        distributed.reported_wait(),
        strategy.accelerator_context(timeout=timeout),
        without_accelerate_parallelism(),
    ):
        plugin = dict(strategy.plugin().arguments)
        handlers = [InitProcessGroupKwargs(timeout=timeout), *plugin.pop("kwargs_handlers", ())]
        accelerator = Accelerator(
            mixed_precision=ARITHMETIC[precision].mixed_precision,
            gradient_accumulation_steps=1,
            step_scheduler_with_optimizer=False,
            dataloader_config=DataLoaderConfiguration(
                even_batches=False, split_batches=False, dispatch_batches=False, non_blocking=True
            ),
            kwargs_handlers=handlers,
            **plugin,
        )
    open_sequence_groups(strategy.expected.sequence_size)
    open_tensor_groups(
        strategy.expected.tensor_size, device_type=accelerator.device.type, mesh=accelerator.torch_device_mesh
    )
    distributed.open_group(distributed.Group.HOST)
    distributed.open_group(distributed.Group.BACKGROUND)  # now: it needs the store, which ends with the launcher
    check_accelerator(accelerator, strategy.expected, precision=precision, strategy=strategy.name)
    return accelerator


def own_batches(accelerator: Accelerator, loader: DataLoader[Any]) -> Iterable[Batch]:
    """Return this rank's microbatches of the world's, in host memory; ranks that share rows or layers get the same."""
    own: Iterable[Batch]
    group = tensor_group() if tensor_group().size > 1 else sequence_group()
    if group.size == 1:
        own = accelerator.prepare_data_loader(loader, device_placement=False)
        return own
    own = prepare_data_loader(
        loader, num_processes=group.num_groups, process_index=group.number, put_on_device=False, even_batches=False
    )
    return own


def check_accelerator(accelerator: Accelerator, expected: ExpectedSetup, *, precision: str, strategy: str) -> None:
    """Raise StrategyError naming every difference between the Accelerator and what was requested."""
    state = accelerator.state
    differences = [
        _difference("distributed type", expected.distributed_types, accelerator.distributed_type.name),
        _difference("number of processes", (expected.num_processes,), accelerator.num_processes),
        _difference("processes in the process group", (expected.num_processes,), distributed.world()),
        _difference("mixed precision", (ARITHMETIC[precision].mixed_precision,), accelerator.mixed_precision),
    ]
    if "FSDP" in expected.distributed_types and state.fsdp_plugin is not None:
        differences.append(_difference("FSDP version", (2,), state.fsdp_plugin.fsdp_version))
    if expected.zero_stage is not None and state.deepspeed_plugin is not None:
        differences.append(_difference("ZeRO stage", (expected.zero_stage,), int(state.deepspeed_plugin.zero_stage)))
    _refuse(differences, strategy)


def check_prepared(model: nn.Module, expected: ExpectedSetup, *, strategy: str) -> None:
    """Raise StrategyError unless the prepared model has the strategy's class and ZeRO stage."""
    names = {cls.__name__ for cls in type(model).__mro__}
    differences: list[str | None] = []
    if expected.model_class is not None and expected.model_class not in names:
        differences.append(f"model: requested {expected.model_class}, got {type(model).__name__}")
    stage: Any = getattr(model, "zero_optimization_stage", None)
    if expected.zero_stage is not None and stage is not None:
        differences.append(_difference("engine's ZeRO stage", (expected.zero_stage,), int(stage())))
    _refuse(differences, strategy)


def _difference(name: str, requested: tuple[Any, ...], got: object) -> str | None:
    return None if got in requested else f"{name}: requested {requested[0]}, got {got}"


def _refuse(differences: list[str | None], strategy: str) -> None:
    lines = [line for line in differences if line is not None]
    if lines:
        listed = "\n".join(f"  {line}" for line in lines)
        raise StrategyError(
            f"{strategy} was launched, but Accelerate built something else:\n{listed}\n"
            "Compare the accelerate config with the one of that name in accelerate_configs/."
        )
