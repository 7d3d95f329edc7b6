"""What a forward pass changes in a model beside gradients, kept: buffers, plain attributes, batch-norm statistics."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor, nn

from finetune.model.batch_norm import GhostBatchNorm

_PLAIN = (int, float, bool, str, type(None))


@contextmanager
def keep_model_state(model: nn.Module) -> Iterator[None]:
    """Leave buffers, plain attributes of modules and running statistics as they were.

    Rotary embeddings that grow with the length (`rope_type: dynamic`) replace their buffer and keep the length reached.
    """
    kept = [_ModuleState(module) for module in model.modules()]
    try:
        yield
    finally:
        for state in kept:
            state.restore()


class _ModuleState:
    """What one module had."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = {name: (each, each.clone()) for name, each in _real_buffers(module)}
        self._plain = {name: value for name, value in vars(module).items() if type(value) in _PLAIN}
        self._groups: Any = copy(module.groups) if isinstance(module, GhostBatchNorm) else None

    def restore(self) -> None:
        for name, (buffer, value) in self._buffers.items():
            if not buffer.equal(value):
                buffer.copy_(value)
            self._module._buffers[name] = buffer
        for name, value in self._plain.items():
            if getattr(self._module, name, value) is not value:
                setattr(self._module, name, value)
        if isinstance(self._module, GhostBatchNorm):
            self._module.groups = self._groups


def _real_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device.type != "meta":
            yield name, buffer
