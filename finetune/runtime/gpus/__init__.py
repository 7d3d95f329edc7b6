"""Specifications and rental prices of GPU models, as two editable tables."""

from finetune.runtime.gpus.specifications import GpuKind, find_gpu

__all__ = ["GpuKind", "find_gpu"]
