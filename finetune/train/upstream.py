"""Workarounds for libraries; `tests/train/test_upstream.py` fails where one is no longer needed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer


def without_accelerate_wrapper(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's own wrapper, which adds nothing without a scaler.

    `AcceleratedOptimizer.step` searches the disk for the package `lomo_optim` at every step, twice (Accelerate 1.15,
    accelerate/optimizer.py, `is_lomo_available`). DeepSpeed's wrapper, a subclass, is kept.
    """
    return optimizer.optimizer if type(optimizer) is AcceleratedOptimizer else optimizer


def supports_found_inf(optimizer: Any, *, device: torch.device) -> bool:
    """Return whether the optimizer changes nothing, its own state included, where `found_inf` on the device is 1.

    Torch's fused SGD does not: it allocates the momentum of a skipped first step and later reads it as its own (torch
    2.13, torch/optim/sgd.py, `_fused_sgd`).
    """
    supports = getattr(optimizer, "_step_supports_amp_scaling", False) and not isinstance(optimizer, torch.optim.SGD)
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return supports and all(parameter.device.type == device.type for parameter in parameters)


@contextmanager
def replace_engine_step(engine: Any, step: Callable[..., Any]) -> Iterator[None]:
    """Have Accelerate call `step` in place of the engine's own, at the end of a backward pass.

    DeepSpeed's engine clips and updates there (`DeepSpeedEngineWrapper.backward`, accelerate 1.15), and neither it nor
    its optimizer has a hook around that.
    """
    engine.step = step
    try:
        yield
    finally:
        del engine.step
