"""Specifications and rental prices of GPU models, as two editable tables."""

from finetune.runtime.gpus.specifications import GpuModel, find_gpu

__all__ = ["GpuModel", "find_gpu"]
