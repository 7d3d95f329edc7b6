"""Prepared sets on disk: tokenized once, cached by content, verified, and memory-mapped."""
