"""`finetune launch`: from a job and an accelerate file to processes on several hosts."""
