"""Launching on several hosts: supervision of a run whose hosts come and go. Knows nothing of training."""
