"""The memory of a job, predicted before it trains: counted state, a step without values, and the trial of a batch."""
