"""A package that finetune knows nothing of. Its modules are imported only where a job names what they add."""
