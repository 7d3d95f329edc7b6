"""Saves step after step on one process, while faults strike: `exiting_program.py FOLDER`."""

import sys
from pathlib import Path

from finetune.runtime.progress import Progress
from tests.checkpoint.small_run import Run

folder = Path(sys.argv[1])
run = Run(folder).train(range(2))
run.saver(Progress(3))
print("training goes on")
if "--waits" in sys.argv:
    run.saver.wait_for_writes()
while not list(folder.glob(".staging-*")):
    pass  # the write has not begun
