"""A table per peer: what each of its keys becomes, and how it is completed to a job."""
