"""Saves, resumes and seeks in turn: `python saving_rounds.py FOLDER ROUNDS`, where `job.yaml` lies in the folder.

Saves and seeks are made in a fork of their own, whose memory nothing has warmed, as that of a run that starts; this
process imports everything and never computes, so that it may be forked. A resume is a start of its own. Leaves
`figures.json` in the folder.
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
from save_worker import build, train_one_step

from finetune.config.load import load_config
from finetune.data.loader import train_loader
from finetune.report.run_log import RunLog
from finetune.run.build.data import make_training_data
from finetune.run.build.prepared_model import PreparedModel, make_accelerator
from finetune.run.train import launched_strategy

from contest.resuming import checkpointer

STEP = 1000
LATE = 100_000
SEEKS = 25
SKIPPED = 1000
"""Batches that Accelerate's `skip_first_batches` has to make and throw away."""
Figures = dict[str, Any]


def main(folder: Path, rounds: int) -> None:
    job = folder / "job.yaml"
    figures: Figures = {"seeks": in_fork(partial(seeks, job)), "stalls": in_fork(partial(stalls, job, folder, rounds))}
    figures["resumes"] = []
    for number in range(rounds):
        ways = ("ours", "accelerate") if number % 2 else ("accelerate", "ours")
        for way in ways:  # nobody is always the first
            figures["resumes"].append({"round": number, **resumed(way, job, folder)})
    (folder / "figures.json").write_text(json.dumps(figures))


def in_fork(act: Callable[[], Any]) -> Any:
    """Return what the work has come to in a fork of this process; raises RuntimeError where that has failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with os.fdopen(writing, "w") as stream:
                json.dump(act(), stream)
        except BaseException:  # whatever it is, this process must not go on as its parent
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
    worker = str(Path(__file__).with_name("resume_worker.py"))
    done = subprocess.run([sys.executable, worker, way, str(job), str(folder)], stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"a resume by {way} has failed; its traceback is above")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def stalls(job: Path, folder: Path, rounds: int) -> Figures:
    """Save in turn behind training and by Accelerate; return the seconds that training waits, and leave one of each."""
    machine = build(job)
    train_one_step(machine)
    ours = checkpointer(machine, folder)
    ours.rehearse(num_saves=rounds)  # as at a run's start
    found: Figures = {"ours": [], "ours_total": [], "accelerate": []}
    for number in range(1, rounds + 1):
        saved = ours.save(STEP + number, progress={"step": STEP + number})
        found["ours"].append(saved.stall_seconds)
        found["ours_total"].append(saved.seconds)
        found["state_bytes"] = saved.size_bytes
        found["accelerate"].append(_save_by_accelerate(machine, folder / "accelerate"))
    return found


def _save_by_accelerate(machine: PreparedModel, folder: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    machine.accelerator.save_state(str(folder))
    return time.perf_counter() - started


def seeks(job: Path) -> Figures:
    """Return the CPU-seconds to the first batch at the start and late in a long job, and what skipping would cost."""
    loaded = load_config(job, [f"train.steps={2 * LATE}", "data.shuffle=true"])
    config, lessons = loaded.config, make_training_data(loaded.config, RunLog(is_main=False))
    accelerator = make_accelerator(config, launched_strategy(loaded))

    def loader(first_step: int) -> Any:
        batches = train_loader(
            lessons.training,
            lessons.task.collate,
            global_batch_size=8,
            microbatch_size=8,
            first_step=first_step,
            num_steps=2 * LATE,
            section=config.data,
        )
        return accelerator.prepare_data_loader(batches)

    found: Figures = {"start": [], "late": [], "skipped": SKIPPED}
    for number in range(1 + SEEKS):  # the first warms up
        found["start"].append(_seconds_to_first(partial(loader, 0)))
        found["late"].append(_seconds_to_first(partial(loader, LATE + number)))
    found["skipping"] = [_seconds_to_first(lambda: skip_first_batches(loader(0), SKIPPED))]
    return {**found, "start": found["start"][1:], "late": found["late"][1:]}


def _seconds_to_first(batches: Callable[[], Any]) -> float:
    started = time.process_time()
    next(iter(batches()))
    return time.process_time() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
