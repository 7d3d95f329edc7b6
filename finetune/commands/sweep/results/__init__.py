"""What the runs have reached."""
