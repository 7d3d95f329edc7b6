"""What a checkpoint says of one tensor: whose it is, what it is of it, and its shape and type."""

import math
from dataclasses import dataclass

import torch

PARAMETER = "parameter"
"""The key of a parameter's own value; other keys are optimizer state (`exp_avg`, `momentum_buffer`, ...)."""

BUFFER = "buffer"
"""The key of a persistent buffer's value."""

WHOLE = frozenset({PARAMETER, BUFFER})
"""Keys of what a model consists of; everything else belongs to the optimizer."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The safetensors format's names of types."""

_CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of the training state, free of how it is spread over ranks."""

    name: str  # canonical name of the parameter or buffer
    key: str  # PARAMETER, BUFFER or the optimizer's word
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES

    @property
    def stored_name(self) -> str:
        """Return the name in the file: the parameter's own, or `<parameter>/<optimizer's word>`."""
        return self.name if self.key in WHOLE else f"{self.name}/{self.key}"

    @property
    def part(self) -> str:
        """Return the folder it is kept in."""
        return "model" if self.key in WHOLE else "optimizer"

    @property
    def num_elements(self) -> int:
        """Return the number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole tensor."""
        return self.num_elements * DTYPES[self.dtype].itemsize


def dtype_code(dtype: torch.dtype) -> str:
    """Return the safetensors format's name of the type; raises KeyError for one that it does not have."""
    return _CODES[dtype]
