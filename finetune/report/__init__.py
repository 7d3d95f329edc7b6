"""Who is told about the run: console, event log, trackers."""
