"""`finetune plan`: which strategies fit, how long a step and the job take, what they cost - before any weight is loaded."""
