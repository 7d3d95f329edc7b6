"""The Python API: jobs written in Python, and a function for each of the main commands."""
