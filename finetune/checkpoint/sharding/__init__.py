"""Which rank holds which elements of the training state under each strategy, and gathering whole tensors from them."""
