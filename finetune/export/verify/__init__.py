"""Verifies that an exported folder holds the trained model: a fresh process loads it and compares the results."""
