"""Trains a job several times in one process, or in the same ranks, each time with other overrides, given as JSON."""

import json
import sys
from pathlib import Path

from tests.scenarios.trained import train_here

if __name__ == "__main__":
    for overrides in json.loads(sys.argv[2]):
        train_here(Path(sys.argv[1]), *overrides)
