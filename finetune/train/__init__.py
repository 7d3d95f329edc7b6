"""The loop, the step, and what they are handed."""
