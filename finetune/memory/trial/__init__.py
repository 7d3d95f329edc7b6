"""The longest batch of a run, tried before its first step, and the microbatch size that fits."""
