"""Samples of several texts that belong together."""
