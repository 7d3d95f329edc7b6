"""Which samples stand at which position: pure functions of the position."""
