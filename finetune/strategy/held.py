"""Weights that learn in 16 bits stay in 16 bits under FSDP2."""

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate import Accelerator


@contextmanager
def weights_as_held(accelerator: Accelerator, *, is_wanted: bool) -> Iterator[None]:
    """Have Accelerate prepare a model for FSDP2 without float32 copies of its weights.

    It makes them whenever it is told of mixed precision (`fsdp2_prepare_model`, accelerate 1.15), which is right unless
    the optimizer rounds by chance. The plugin's own policy still says what is computed with.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if not is_wanted or plugin is None or plugin.fsdp_version != 2:
        yield
        return
    kind = type(accelerator)
    accelerator.__class__ = type(kind.__name__, (kind,), {"mixed_precision": "no"})
    try:
        yield
    finally:
        accelerator.__class__ = kind
