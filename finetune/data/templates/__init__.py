"""Templates that are not ours: looked at before they run, and run in a process of their own with limits."""
