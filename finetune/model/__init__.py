"""The model: tokenizer, weights, adapters, what is frozen, how large it is."""
