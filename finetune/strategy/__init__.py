"""The distribution of a run over processes: the launcher's settings, Accelerate's arguments, the expected result."""
