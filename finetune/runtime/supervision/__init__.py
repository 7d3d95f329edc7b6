"""Supervision of a run: status, heartbeat, hang detection, signals, spot notices, and the exit of its processes."""
