"""Files: written whole or not at all, read with bounds, checked by digests, or kept in object storage."""
