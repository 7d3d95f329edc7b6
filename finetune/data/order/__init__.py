"""The order of samples: pure functions of the position."""
