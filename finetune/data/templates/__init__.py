"""Jinja templates, run in Jinja's sandbox: chat templates and row templates."""
