"""Random weights as a pure function of (seed, module name): the same on every rank and under every strategy."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from finetune.model.upstream import initialize_marked
from finetune.runtime.seeds import derive_seed

Gather = Callable[[Sequence[nn.Parameter]], AbstractContextManager[Any]]


def initialize_weights(
    model: PreTrainedModel, *, seed: int, gather: Gather, only: frozenset[str] | None = None
) -> None:
    """Draw every weight anew by the model's own rules, each module from its own seed, in float32 on the CPU.

    With `only`, the weights of these names alone. Leaves torch's random state as it was. `gather` makes partitioned
    parameters whole while they are written. Collective where `gather` is.
    """
    tied = frozenset(getattr(model, "all_tied_weights_keys", ()))
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for name, module, owner in _children_first(model, name="", owner=model):
            parameters = _parameters_written_by(module)
            kept = _excluded_parameters(module, name=name, only=only)
            if only is not None and len(kept) == len(list(module.parameters(recurse=False))):
                continue
            with gather(parameters) if parameters else nullcontext(), as_cpu_float32(parameters):
                torch.default_generator.manual_seed(derive_seed(seed, "weights", name))
                with _protected_from_init([*_tied_parameters(module, name=name, tied=tied), *kept]):
                    owner._init_weights(module)
                initialize_marked(module)


@contextmanager
def as_cpu_float32(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hold the parameters as float32 on the CPU meanwhile; afterwards their own storage has the values.

    Random numbers then differ neither by device nor by type: a bfloat16 weight is the rounded float32 one.
    """
    elsewhere = [p for p in parameters if p.dtype != torch.float32 or p.device.type != "cpu"]
    storages = [p.data for p in elsewhere]
    for parameter in elsewhere:
        parameter.data = parameter.data.to(device="cpu", dtype=torch.float32)
    yield
    for parameter, storage in zip(elsewhere, storages, strict=True):
        storage.copy_(parameter.data)
        parameter.data = storage


def _children_first(
    module: nn.Module, *, name: str, owner: PreTrainedModel
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield every module after its children, with the model whose rules hold for it (as transformers walks them)."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _children_first(child, name=f"{name}.{child_name}" if name else child_name, owner=child_owner)
    yield name, module, owner


def _parameters_written_by(module: nn.Module) -> list[nn.Parameter]:
    """Return what `_init_weights(module)` may write: its own parameters and, in some models, its children's."""
    parameters = dict.fromkeys(module.parameters(recurse=False))
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            parameters.update(dict.fromkeys(child.parameters(recurse=False)))
    return list(parameters)


def _tied_parameters(module: nn.Module, *, name: str, tied: frozenset[str]) -> list[nn.Parameter]:
    """Return the module's parameters that belong to another module, which has drawn them already."""
    prefix = f"{name}." if name else ""
    return [parameter for own, parameter in module.named_parameters(recurse=False) if prefix + own in tied]


def _excluded_parameters(module: nn.Module, *, name: str, only: frozenset[str] | None) -> list[nn.Parameter]:
    """Return the module's own parameters that are not to be drawn."""
    if only is None:
        return []
    prefix = f"{name}." if name else ""
    return [parameter for own, parameter in module.named_parameters(recurse=False) if prefix + own not in only]


@contextmanager
def _protected_from_init(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Set the flag on which transformers' own initialisers leave a parameter alone."""
    for parameter in parameters:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    yield
    for parameter in parameters:
        del parameter._is_hf_initialized  # type: ignore[attr-defined]
