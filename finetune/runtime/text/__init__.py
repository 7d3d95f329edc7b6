"""Text that is printed or written down: without secrets, and without characters that act on a terminal."""
