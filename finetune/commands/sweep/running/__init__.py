"""The runs while they go on: data, processes, slots, and what is shown of them."""
