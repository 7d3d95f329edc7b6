"""The commands of a job's hosts, as shell text and YAML for schedulers.

Nothing here has side effects: each function returns text. User input reaches a shell only through `shell.quoted`, and
YAML only through its writer.
"""
