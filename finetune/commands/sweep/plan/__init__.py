"""Which runs a sweep has, and what each is started with."""
