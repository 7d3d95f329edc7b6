"""The activations that are saved for the backward pass: recomputed, or offloaded to the host."""
