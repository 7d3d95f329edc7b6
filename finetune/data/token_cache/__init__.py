"""Prepared sets on disk: tokenised once, found again by content, verified, and memory-mapped as they are read."""
