"""Ranks without a launcher of PyTorch's: read from the variables of `srun` and `mpirun`. Imports no torch."""
