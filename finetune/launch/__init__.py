"""Launching ranks on this host and on others. Knows nothing of training."""
