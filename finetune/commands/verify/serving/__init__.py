"""`finetune verify serving`: compares a served model with the folder that was exported."""
