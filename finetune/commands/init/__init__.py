"""`finetune init`: recipes, jobs made of the configs of other trainers, and a job by five questions."""
