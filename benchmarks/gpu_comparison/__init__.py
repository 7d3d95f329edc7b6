"""The suite on one GPU: what `benchmarks/gpu.py` measures."""
