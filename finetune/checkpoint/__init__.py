"""Checkpoints: format/ (what is on disk), sharding/ (which rank holds what), write/, read/."""
