"""Launching on several hosts, and supervision of a run whose hosts join and leave. Knows nothing of training."""
