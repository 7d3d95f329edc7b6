"""Writing checkpoints: snapshot, staged and verified files, saves in the background, retention, the preflight."""
