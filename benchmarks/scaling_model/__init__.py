"""The scaling model: what `benchmarks/scaling.py` computes, prints and checks. The page: docs/scaling.md."""
