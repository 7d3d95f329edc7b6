"""`finetune evaluate --against`: is a trained model better than its base model or another one?"""
