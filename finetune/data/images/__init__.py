"""Images: reading them from rows, decoding, and transforms."""
