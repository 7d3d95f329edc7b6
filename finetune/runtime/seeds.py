"""Randomness that depends only on numbers one can write down: (seed, step, rank, purpose)."""

import hashlib
import os
import random

import numpy as np
import torch


def derive(*parts: int | str) -> int:
    """Return a 63-bit seed that is the same on every machine and changes with every part."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_everything(*parts: int | str) -> None:
    """Seed Python, NumPy and torch (every device) from the parts."""
    seed = derive(*parts)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def use_deterministic_kernels() -> None:
    """Make torch refuse kernels that are not repeatable; call it before the first kernel runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
