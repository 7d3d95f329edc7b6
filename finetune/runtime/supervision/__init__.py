"""Supervision of a run: its status, its heartbeat, signals and notices that stop it, and how its processes exit."""
