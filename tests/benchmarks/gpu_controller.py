"""What `benchmarks/gpu.py` does with its workers: one computes, another waits; until it is ended from outside."""

import sys
from pathlib import Path

from gpu_comparison.cases import cases
from gpu_comparison.workers import Settings, alive

if __name__ == "__main__":
    first, second, *_ = cases()
    with alive(Settings(Path(sys.argv[1]), "cpu", True, module="tests.benchmarks.fake_gpu_worker")) as workers:
        workers._of(first), workers._of(second)
        print(*(each._process.pid for each in workers._alive.values()), flush=True)
        workers.run(first, then=second, timeout_seconds=300)
