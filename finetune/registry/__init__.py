"""Choices of a job by name: a table for each, with the facts that other packages need. Imports no torch."""
