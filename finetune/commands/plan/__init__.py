"""`finetune plan`: the strategies that fit, the duration and the cost of a job, without loading any weights."""
