"""`finetune sweep`: one job with several values of its keys, a run for each."""
