"""What is kept on disk is what was written: digests by block, marks by sample, and what becomes of damage."""
