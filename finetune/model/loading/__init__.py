"""Loading: from a hub name, a folder or a config to a model with the right head, and nothing that runs foreign code."""
