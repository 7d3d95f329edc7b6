"""`finetune checkpoint ls`, `show`, `verify` and `prune`."""
