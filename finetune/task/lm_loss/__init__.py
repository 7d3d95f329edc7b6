"""The loss of a language model, computed only at target positions, in chunks, under any wrapper."""
