"""`finetune rehearse`: runs the job and its accelerate file with a small copy of the model on this machine's CPU."""
