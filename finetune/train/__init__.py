"""The loop, the step, and their components."""
