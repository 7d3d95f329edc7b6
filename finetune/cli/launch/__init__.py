"""`finetune launch`: the words of each launcher."""
