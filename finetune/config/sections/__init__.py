"""One file per top-level key of the job YAML."""
