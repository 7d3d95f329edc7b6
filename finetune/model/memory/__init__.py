"""What training takes of a device's memory, estimated from the shapes of a model."""
