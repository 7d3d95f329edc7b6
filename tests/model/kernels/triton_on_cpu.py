"""Triton's interpreter, so that kernels run on a CPU. A process that imports this first has TRITON_INTERPRET=1.

Two things that kernels of liger-kernel need are missing in it (triton 3.9): floating-point arguments have no methods,
and the functions of libdevice return None.
"""

import importlib
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _with_floats(argument: object) -> object:
    if isinstance(argument, float):
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
    return _convert(argument)


def install() -> None:
    """Import liger's kernels and make them run on a CPU."""
    interpreter._implicit_cvt = _with_floats
    importlib.import_module("liger_kernel.ops.rms_norm").rsqrt = lambda x: tl.math.rsqrt(x)
    importlib.import_module("liger_kernel.ops.geglu").tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


install()
