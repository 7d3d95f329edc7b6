"""How torch manages the memory of a GPU, decided before torch is imported. Imports no torch.

Rows differ in length from step to step, so blocks of ever new sizes are asked for. With expandable segments a block
grows in place, where torch would else keep blocks that fit nothing and fail with memory to spare
(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf).
"""

import ctypes
import os
import sys
from collections.abc import MutableMapping

ALLOC_CONF = "PYTORCH_ALLOC_CONF"
EXPANDABLE = "expandable_segments:True"

_NAMES = (
    ALLOC_CONF,
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK",  # registers segments, which must not grow then
)
"""Variables with which a user sets up the allocator, or settings that need another allocator."""

_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED


def use_expandable_segments(variables: MutableMapping[str, str] = os.environ) -> bool:
    """Have torch use expandable segments where every GPU supports them and the user has not set up the allocator.

    Returns whether that was done; not where torch uses a GPU already. The run's `environment.json` has the variable,
    with all others of torch. Nothing here hands tensors of a GPU to another process or records CUDA graphs.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return False
    if any(name in variables for name in _NAMES) or not has_virtual_memory():
        return False
    variables[ALLOC_CONF] = EXPANDABLE
    return True


def has_virtual_memory() -> bool:
    """Return whether there are NVIDIA GPUs, all of which can map memory: virtual ones of some clouds cannot."""
    try:
        driver = ctypes.CDLL("libcuda.so.1") if sys.platform == "linux" else None
    except OSError:
        return False
    return driver is not None and _all_support(driver)


def _all_support(driver: ctypes.CDLL) -> bool:
    number, device, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0 or number.value == 0:
        return False
    return all(
        driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDeviceGetAttribute(ctypes.byref(value), _VIRTUAL_MEMORY, device) == 0
        and value.value == 1
        for index in range(number.value)
    )
