"""`finetune rehearse`: the exact job and accelerate file, with a small copy of the model, on this machine's CPU."""
