"""`finetune doctor`: problems of this machine, and the best settings of a job's data loader."""
