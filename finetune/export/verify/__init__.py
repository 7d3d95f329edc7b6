"""Proves that an exported folder is the trained model: a fresh process loads it and compares it with the training."""
