"""TensorFloat-32: products of float32 matrices and convolutions on tensor cores, with 10 bits of mantissa."""

from collections.abc import Iterator

import torch

from finetune.errors import UserError

MIN_CAPABILITY = (8, 0)
"""Of the GPUs that have it."""


def set_tf32(wanted: bool | None, device: torch.device, *, is_deterministic: bool, is_float32: bool) -> Iterator[str]:
    """Switch TF32 on or off for this process, and yield what to log; None is on where the GPU has it.

    Not by default in deterministic runs. Raises UserError if it is wanted and the device does not have it.

    By torch's process-wide switches: `fp32_precision`, which torch 2.9 has for each backend, makes every reader of
    these raise, torch's own compiler included (seen with 2.11 and 2.13).
    """
    is_there = has_tf32(device)
    if wanted and not is_there:
        raise UserError(
            f"train.tf32: `true` needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer, and this run is on "
            f"`{device}`, which has no TF32. Write `auto`, or remove the key."
        )
    if not is_there:
        return
    is_on = not is_deterministic if wanted is None else wanted
    torch.set_float32_matmul_precision("high" if is_on else "highest")
    torch.backends.cudnn.allow_tf32 = is_on
    if is_on:
        yield "tf32: on, products of float32 matrices have 10 bits of mantissa (`train.tf32: false` for all 23)"
    elif is_float32:
        reason = "run.deterministic" if wanted is None else "train.tf32"
        yield (
            f"tf32: off ({reason}), so products of float32 matrices run at about a sixth of the speed of TF32. "
            "Write `train.tf32: true`, or `train.precision: bf16`."
        )


def has_tf32(device: torch.device) -> bool:
    """Tell whether the device is a GPU with TF32."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
