"""The subjects of the doctor, one per module: facts, gatherer and checks."""
