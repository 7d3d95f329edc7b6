"""The loss of a language model: computed at target positions alone, in chunks, under any wrapper."""
