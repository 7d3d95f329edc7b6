"""Saves, resumes and seeks in turn: `python -m comparison.saving_worker FOLDER ROUNDS`, with `job.yaml` in the folder.

Saves and seeks are made in a fork of their own, whose memory nothing has warmed, as that of a run that starts; this
process imports everything and never computes, so that it may be forked. A resume is a start of its own:
`python -m comparison.resume_worker`. Leaves `figures.json`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches

from finetune.checkpoint.write.saver import SavedCheckpoint
from finetune.runtime.progress import Progress

from comparison.product import Built, build, loaders

STEP = 1000
LATE = 100_000
NUM_SEEKS = 25
NUM_SKIPPED = 1000
"""Batches that Accelerate's `skip_first_batches` has to make and throw away."""
Figures = dict[str, Any]


def main(folder: Path, rounds: int) -> None:
    job = folder / "job.yaml"
    figures: Figures = {"seeks": in_fork(partial(seeks, job)), "stalls": in_fork(partial(stalls, job, folder, rounds))}
    figures["resumes"] = []
    for number in range(rounds):
        ways = ("ours", "accelerate") if number % 2 else ("accelerate", "ours")
        for way in ways:  # nobody is always the first
            figures["resumes"].append({"round": number, "way": way, **resumed(way, job, folder)})
    (folder / "figures.json").write_text(json.dumps(figures))


def in_fork(act: Callable[[], Any]) -> Any:
    """Return what the work returns in a fork of this process; raises RuntimeError where it fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as stream:
                json.dump(act(), stream)
        except BaseException:  # whatever it is, this process must not continue as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    if os.waitpid(child, 0)[1] != 0:
        raise RuntimeError("a measurement has failed; its traceback is above")
    return json.loads(text)


def resumed(way: str, job: Path, folder: Path) -> Figures:
    """Return what a resume takes in a process that starts for it; raises RuntimeError where it fails."""
    command = [sys.executable, "-m", "comparison.resume_worker", way, str(job), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"a resume by {way} has failed; its traceback is above")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def stalls(job: Path, folder: Path, rounds: int) -> Figures:
    """Save in the background and by Accelerate in turn; return the seconds that training waits; one of each stays."""
    built = build(job)
    built.take_step()
    checkpoints: list[SavedCheckpoint] = []
    ours = built.saver(folder / "checkpoints", on_saved=checkpoints.append)
    ours.rehearse(num_saves=rounds)  # as at a run's start
    found: Figures = {"ours": [], "ours_total": [], "accelerate": []}
    for number in range(1, rounds + 1):
        ours(Progress(step=STEP + number))
        ours.wait_for_writes()
        saved = checkpoints[-1]
        found["ours"].append(saved.stall_seconds)
        found["ours_total"].append(saved.seconds)
        found["state_bytes"] = saved.size_bytes
        found["accelerate"].append(_save_by_accelerate(built, folder / "accelerate"))
    return found


def _save_by_accelerate(built: Built, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    built.prepared.accelerator.save_state(str(folder))
    return time.perf_counter() - started


def seeks(job: Path) -> Figures:
    """Return the CPU-seconds to the first batch at the start and late in a long job, and what skipping would cost."""
    loader = loaders(job, num_steps=2 * LATE)
    found: Figures = {"start": [], "late": [], "skipped": NUM_SKIPPED}
    for number in range(1 + NUM_SEEKS):  # the first warms up
        found["start"].append(_seconds_to_first(partial(loader, 0)))
        found["late"].append(_seconds_to_first(partial(loader, LATE + number)))
    found["skipping"] = [_seconds_to_first(lambda: skip_first_batches(loader(0), NUM_SKIPPED))]
    return {**found, "start": found["start"][1:], "late": found["late"][1:]}


def _seconds_to_first(batches: Callable[[], Any]) -> float:
    started = time.process_time()
    next(iter(batches()))
    return time.process_time() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
