"""Makes the workloads of compare.py in a process of its own: `python make_workloads.py SPEC.json`."""

import sys
from pathlib import Path

import torch

from contest.making import main

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
