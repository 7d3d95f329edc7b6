"""Where a run is reported: console, event log, trackers."""
