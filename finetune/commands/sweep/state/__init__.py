"""What a sweep remembers, and how each of its runs stands."""
