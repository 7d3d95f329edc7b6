"""The scaling model: what `benchmarks/scaling.py` computes, prints and checks. The page: docs/proof/scaling.md."""
