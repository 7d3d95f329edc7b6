"""`finetune plan`: which strategies fit, how long the job takes and what it costs, before any weight is loaded."""
