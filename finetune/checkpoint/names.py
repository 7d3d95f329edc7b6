"""A model's parameters and persistent buffers under names that no wrapper has touched."""

from collections.abc import Iterable
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from finetune.errors import CheckpointError
from finetune.runtime.parameters import canonical_name

T = TypeVar("T")


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by canonical name; tied ones appear once, under the first of their names."""
    return _unique(bare(model).named_parameters())


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the model's state (the persistent ones) by canonical name."""
    found: list[tuple[str, Tensor]] = []
    for prefix, module in bare(model).named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found.append((f"{prefix}.{name}" if prefix else name, buffer))
    return _unique(found)


def bare(model: nn.Module) -> nn.Module:
    """Return the model without DDP or DeepSpeed's engine around it."""
    is_engine = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
    inner = model.module if isinstance(model, DistributedDataParallel) or is_engine else model
    assert isinstance(inner, nn.Module)
    return inner


def _unique(found: Iterable[tuple[str, T]]) -> dict[str, T]:
    named: dict[str, T] = {}
    for name, value in found:
        plain = canonical_name(name)
        if plain in named:
            raise CheckpointError(
                f"two tensors of the model are both called {plain} once the wrappers' names are taken away. "
                "A submodule that is named like a wrapper (`module`, `_orig_mod`) must be renamed."
            )
        named[plain] = value
    return named
