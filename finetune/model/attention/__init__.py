"""Attention: which implementation a model gets, and our own, which keeps the samples of a row apart."""
