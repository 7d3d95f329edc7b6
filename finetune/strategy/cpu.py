"""The gloo bridge: FSDP and DeepSpeed on a machine without an accelerator.

With `cpu=True` Accelerate silently builds plain DDP for both, and without it no process group at all; every rank would
then train a copy of its own. One private function of Accelerate decides, and only that one is replaced, while the
Accelerator is built. Seen with Accelerate 1.15.0; `tests/strategy/test_cpu.py` fails loudly when it changes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from accelerate.state import PartialState
from accelerate.utils import DistributedType


@contextmanager
def gloo_bridge() -> Iterator[None]:
    """Make Accelerate set up gloo and the CPU for a strategy that it only knows on GPUs."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    os.environ["DS_ACCELERATOR"] = "cpu"
    with patch.object(PartialState, "_prepare_backend", _gloo):
        yield


def _gloo(*_: object, **__: object) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU
