"""Kernels other than the model's own operations: compiled by torch, and fused ones of liger-kernel."""
