"""The subjects of the doctor: each module has its facts, its gatherer and its checks."""
