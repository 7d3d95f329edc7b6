"""What is learnt: tasks, their losses and their metrics."""
