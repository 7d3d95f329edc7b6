"""The comparison with other trainers: workloads, competitors in processes of their own, and the parts of `compare.py`."""
