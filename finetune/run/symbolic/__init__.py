"""The memory and the FLOPs of a job's step, predicted by running it without values."""
