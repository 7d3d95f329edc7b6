"""The tables: one line per key of each peer."""
