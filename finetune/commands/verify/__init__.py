"""`finetune verify`: runs the user's job in several ways and compares the results."""
