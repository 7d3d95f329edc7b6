"""The memory of a run stays at the level of its first steps."""

import os
import sys

import pytest
from memory_growth import NUM_PROCESSES, ROOT, grow, write_job

from tests import launching
from tests.devices import ON_GPU

RUN_AND_PRINT_RESERVED_MEMORY = """
import torch
from finetune.cli.program import main

try:
    main()
finally:
    print("reserved", torch.cuda.memory_stats().get("reserved_bytes.all.peak", 0))
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", NUM_PROCESSES)
def test_memory_after_2000_steps_of_varying_lengths(strategy, figure):
    grown = grow(strategy, steps=2000)
    figure(f"peak after 2,000 steps over that of the first 100, {strategy}", grown.growth, at_most=1.15)


@pytest.mark.gpu
@ON_GPU[1]
@pytest.mark.timeout(1800)
def test_reserved_memory_of_a_gpu_after_2000_steps_of_varying_lengths(tmp_path, figure):
    figure("reserved after 2,000 steps over 100", _reserved(tmp_path, 2000) / _reserved(tmp_path, 100), at_most=1.15)


def _reserved(folder, steps):
    """Return the most bytes that torch's allocator has reserved in a run with this number of steps."""
    (folder / str(steps)).mkdir()
    job = write_job(folder / str(steps), steps=steps)
    command = [sys.executable, "-c", RUN_AND_PRINT_RESERVED_MEMORY, "--config", str(job)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = launching.capture(command, folder=folder, environment=environment, timeout_seconds=800)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return int(ended.stdout.splitlines()[-1].removeprefix("reserved "))
