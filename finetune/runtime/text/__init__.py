"""Printed and written text: without secrets and without control characters for terminals."""
