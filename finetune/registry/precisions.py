"""The arithmetic that `train.precision` selects."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Arithmetic:
    """The dtypes of forward and backward passes, except in the linear layers of fp8."""

    name: Literal["fp32", "bf16", "fp16"]  # also the name of its peak FLOP/s in a GPU's specification
    dtype: Literal["float32", "bfloat16", "float16"]  # torch's name
    item_bytes: int

    @property
    def mixed_precision(self) -> str:
        """Return the value of Accelerate's `mixed_precision`."""
        return "no" if self.name == "fp32" else self.name


_BF16 = Arithmetic("bf16", "bfloat16", 2)

ARITHMETIC = {
    "fp32": Arithmetic("fp32", "float32", 4),
    "bf16": _BF16,
    "fp16": Arithmetic("fp16", "float16", 2),
    "fp8": _BF16,
}
"""By `train.precision`.

fp8 runs with Accelerate's bf16, and the layers are converted before `prepare`: Accelerate's own fp8 (1.15) has no
emulation, converts the head's neighbors, and under FSDP2 refuses to load the weights on rank 0 alone.
"""
