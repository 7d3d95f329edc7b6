"""What is known of each kind of GPU, and what renting one costs: two tables that can be edited."""

from finetune.runtime.gpus.specifications import GpuKind, find_gpu

__all__ = ["GpuKind", "find_gpu"]
