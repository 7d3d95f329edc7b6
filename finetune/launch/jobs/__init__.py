"""Job files for schedulers: what a host of a job runs, and the file that Slurm, Kubernetes or SkyPilot is given.

Nothing here runs or asks anything: each function returns a text. What users write reaches a shell only through
`shell.quoted`, and YAML only through its writer.
"""
