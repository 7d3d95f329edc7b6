"""Predicts the memory of a job: counted state, a symbolic step, and the trial of a batch."""
