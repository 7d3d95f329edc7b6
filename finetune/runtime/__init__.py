"""Ranks, seeds, files, signals and optional packages of the process, for all other packages."""
