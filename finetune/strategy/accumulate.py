"""Microbatches that are not the last of their step: gradients are added up, and the ranks need not speak yet."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator

from finetune.strategy.fsdp2 import fsdp2_plugin


@contextmanager
def adding_up(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Have gradients stay where they are meanwhile, under each strategy that can (ZeRO-2 and -3 split them at once).

    FSDP2 also keeps the parameters whole for the next microbatch where `fsdp_reshard_after_forward: false` says that
    there is room for them, so that each layer is gathered once a step.
    """
    with accelerator.no_sync(model):
        if not _keeps_whole(accelerator):
            yield
            return
        model.set_reshard_after_backward(False)
        try:
            yield
        finally:
            model.set_reshard_after_backward(True)


def _keeps_whole(accelerator: Accelerator) -> bool:
    plugin = fsdp2_plugin(accelerator)
    return plugin is not None and plugin.reshard_after_forward is False
