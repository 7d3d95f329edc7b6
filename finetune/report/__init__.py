"""Reports of a run: console, event log, trackers."""
