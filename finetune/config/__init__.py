"""Reads, checks and explains the job YAML. Does not import torch."""
