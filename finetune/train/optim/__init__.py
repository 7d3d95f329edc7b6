"""Optimizers, parameter groups, the learning-rate schedule, weight averages and low-bit optimizer states."""
