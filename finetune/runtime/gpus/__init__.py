"""Specifications and rental prices of GPU models, as two editable tables."""
