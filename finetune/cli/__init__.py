"""Typed words become one call."""
