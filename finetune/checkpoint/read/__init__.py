"""Reading checkpoints: list and inspect them, find and verify the one to resume from, load it."""
