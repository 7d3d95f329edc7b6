"""Attention: which implementation a model gets, and our own for packed samples."""
