"""The comparison on one GPU: what `benchmarks/gpu.py` measures."""
