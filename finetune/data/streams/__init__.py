"""Rows that are prepared window after window while the model trains."""
