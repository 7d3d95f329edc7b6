"""`finetune evaluate`: metrics of a checkpoint, a `final/` or any model folder."""
