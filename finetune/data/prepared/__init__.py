"""Samples on disk: made once, found by content, read as they are asked for."""
