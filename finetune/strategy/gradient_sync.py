"""Gradient accumulation without communication: ranks exchange gradients only in the last microbatch of a step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator


def fsdp2_plugin(accelerator: Accelerator) -> Any:
    """Return Accelerate's settings of FSDP; None under any strategy but FSDP2."""
    return getattr(accelerator.state, "fsdp_plugin", None) if accelerator.is_fsdp2 else None


@contextmanager
def no_gradient_sync(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Accumulate gradients locally meanwhile, under each strategy that can (ZeRO-2 and -3 shard them at once).

    With `fsdp_reshard_after_forward: false`, FSDP2 also keeps the parameters unsharded for the next microbatch, so that
    each layer is gathered once a step.
    """
    with accelerator.no_sync(model):
        if not _keeps_unsharded(accelerator):
            yield
            return
        model.set_reshard_after_backward(False)
        try:
            yield
        finally:
            model.set_reshard_after_backward(True)


def _keeps_unsharded(accelerator: Accelerator) -> bool:
    plugin = fsdp2_plugin(accelerator)
    return plugin is not None and plugin.reshard_after_forward is False
