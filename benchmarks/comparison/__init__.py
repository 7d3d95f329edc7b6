"""Comparison with other trainers: workloads, competitors in processes of their own, the parts of `compare.py`."""
