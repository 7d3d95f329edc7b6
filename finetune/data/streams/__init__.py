"""Streams: rows that are prepared window by window during training."""
