"""Formats: the meaning of a row's columns."""
