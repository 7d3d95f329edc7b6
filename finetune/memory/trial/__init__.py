"""The trial of a run's longest batch before the first step, and the choice of the microbatch size."""
