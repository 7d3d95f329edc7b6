"""Files: written atomically, read with size limits, verified by digests, or kept in object storage."""
