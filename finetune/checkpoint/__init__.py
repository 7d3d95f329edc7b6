"""Checkpoints: staged, verified, renamed; tensors keyed by parameter name."""
