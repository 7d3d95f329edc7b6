"""One test on every device that is there: small on the CPU, where CI runs it, and at full size on a GPU."""

from importlib.util import find_spec

import pytest
import torch

_REASON = "needs a CUDA device, which only `pytest -m gpu` shows"
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=_REASON)]

EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
"""For a test with the parameter `device`: its CPU form in every run, its GPU form by `pytest -m gpu`."""

SELDOM_ON_CPU = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.full), pytest.param("cuda", marks=ON_GPU)]
)
"""The same, where the CPU form costs too much for every run: it is part of `pytest --all`."""

NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
"""For ZeRO's forms: a bare GPU machine has no DeepSpeed, unless its wheel has been taken there."""


def needs(strategy: str) -> list[pytest.MarkDecorator]:
    """Return the marks of what a strategy needs."""
    return [NEEDS_DEEPSPEED] if strategy.startswith("zero") else []
