"""What the proof on pretrained models is made of; `benchmarks/pretrained.py` runs it."""
