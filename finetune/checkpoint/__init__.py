"""Checkpoints: format/ (the files on disk), sharding/ (the shards of each rank), write/, read/."""
