"""`finetune preview`: the samples as the model sees them."""
