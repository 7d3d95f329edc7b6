"""How a run is spread: what the launcher set, what Accelerate is given, and what must come out."""
