"""What `benchmarks/gpu.py` does with a process: it waits for one that never ends, until it is ended from outside."""

import os
import subprocess
import sys
from pathlib import Path

from gpu_comparison.processes import Finish, Processes


def compute_forever(folder: Path, finish: Finish) -> None:
    """Start a process, as a compiler does, write the ids of both, and wait for it."""
    child = subprocess.Popen(["sleep", "300"])
    (folder / "partial").write_text(f"{os.getpid()} {child.pid}")
    (folder / "partial").rename(folder / "processes")
    child.wait()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    Processes(place).run(compute_forever, place, timeout_seconds=300)
