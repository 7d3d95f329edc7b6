"""What is trained: tasks, their losses and their metrics."""
