"""`finetune report`."""
