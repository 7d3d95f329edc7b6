"""`finetune doctor`: problems of the machines of a run, and the best settings of a job's data loader."""
