"""Loading models with the right head from a hub name, a folder or a config, without running untrusted code."""
