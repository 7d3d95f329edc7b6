"""What became of the rows."""
