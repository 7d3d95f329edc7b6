"""`finetune compare`."""
