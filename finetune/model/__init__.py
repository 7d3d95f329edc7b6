"""The model: tokenizer, weights, adapters, attention, frozen parameters, size."""
