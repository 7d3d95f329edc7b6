"""The job YAML: read, checked, explained. Imports no torch."""
