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
    """Initialize all weights by the model's own rules, each module with its own seed, in float32 on the CPU.

    With `only`, just the weights with these names. Does not change torch's random state. `gather` gathers partitioned
    parameters while they are written. Collective if `gather` is.
    """
    tied = frozenset(getattr(model, "all_tied_weights_keys", ()))
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for name, module, owner in _children_first(model, name="", owner=model):
            written = dict.fromkeys(module.parameters(recurse=False))
            for child in module.children():  # in some models `_init_weights` of a module also writes to its children
                if not isinstance(child, PreTrainedModel):
                    written.update(dict.fromkeys(child.parameters(recurse=False)))
            parameters = list(written)
            prefix = f"{name}." if name else ""
            own = {prefix + own_name: parameter for own_name, parameter in module.named_parameters(recurse=False)}
            excluded = [parameter for full, parameter in own.items() if only is not None and full not in only]
            if only is not None and len(excluded) == len(own):
                continue
            # another module, to which they are tied, has initialized them already
            excluded += [parameter for full, parameter in own.items() if full in tied]
            with gather(parameters) if parameters else nullcontext(), as_cpu_float32(parameters):
                torch.default_generator.manual_seed(derive_seed(seed, "weights", name))
                for parameter in excluded:  # transformers' initializers skip parameters with this flag
                    parameter._is_hf_initialized = True  # type: ignore[attr-defined]
                owner._init_weights(module)
                for parameter in set(excluded):
                    del parameter._is_hf_initialized  # type: ignore[attr-defined]
                initialize_marked(module)


@contextmanager
def as_cpu_float32(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Move the parameters to float32 on the CPU in this context; afterwards their own storage has the values.

    Random numbers then depend neither on device nor on dtype: a bfloat16 weight is the rounded float32 one. Parameters
    without values are left alone.
    """
    filled = [p for p in parameters if not p.is_meta]
    elsewhere = [p for p in filled if p.dtype != torch.float32 or p.device.type != "cpu"]
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
    """Yield every module after its children, with the model whose rules apply to it (in the order of transformers)."""
    for child_name, child in module.named_children():
        child_owner = child if isinstance(child, PreTrainedModel) else owner
        yield from _children_first(child, name=f"{name}.{child_name}" if name else child_name, owner=child_owner)
    yield name, module, owner
