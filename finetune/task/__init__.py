"""Tasks, their losses and their metrics."""
