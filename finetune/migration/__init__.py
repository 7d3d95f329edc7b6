"""Turns a config of another trainer into a job: every key is mapped, or named with the reason or what to do instead."""
