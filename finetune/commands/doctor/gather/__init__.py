"""The facts of this machine: each gatherer has a time limit, and what it cannot find out is noted, never raised."""
