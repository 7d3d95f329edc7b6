"""Jinja templates: chat templates and row templates, run in a sandbox unless they are known to be bounded."""
