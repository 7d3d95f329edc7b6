"""What `compare.py` is made of: workloads, contestants, the controller that hands them the token, and the gates."""
