"""A model beside the one that is trained, whole on every rank whatever the strategy does to that one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator
from transformers.integrations import unset_hf_deepspeed_config

_BROADCASTS = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def held_whole(accelerator: Accelerator) -> Iterator[None]:
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
