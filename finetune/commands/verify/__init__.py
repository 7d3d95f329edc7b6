"""`finetune verify`: run the user's own job in several ways and compare the results."""
