"""The sharding of the training state under each strategy, and gathering of whole tensors."""
