"""What the accelerate file says of FSDP2."""

from typing import Any

from accelerate import Accelerator


def fsdp2_plugin(accelerator: Accelerator) -> Any:
    """Return Accelerate's settings of FSDP; None under any strategy but FSDP2."""
    return getattr(accelerator.state, "fsdp_plugin", None) if accelerator.is_fsdp2 else None
