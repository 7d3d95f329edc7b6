"""A GPU that is not there: CPU tensors that count as a GPU's, machines by their recorded facts, streams by their rules.

What a kernel computes is not tested here, nor its speed: the tests with the mark `gpu` do that, where a GPU is.
"""
