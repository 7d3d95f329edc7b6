"""Training on preferences: DPO and its relatives, KTO, and reward models."""
