"""The parts of a run, built from its config: data, model, and the components of the training loop."""
