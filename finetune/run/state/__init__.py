"""The state of a run on disk: its folder, its checkpoints, and how a start resumes from them."""
