"""Prepared sets on disk: tokenized once, found again by content, verified, and memory-mapped as they are read."""
