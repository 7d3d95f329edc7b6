"""The parts of a run, built from its config: data, model, and what the training loop works with."""
