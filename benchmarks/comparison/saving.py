"""Topic 6, saving: how long training waits for a save, how long a resume takes, and what seeking costs.

`python -m comparison.saving FOLDER ROUNDS`, with `job.yaml` in the folder: saves and seeks are made in a fork of their
own, whose memory nothing has warmed, as that of a run that starts; this process imports everything and never computes,
so that it may be forked. A resume is a start of its own: `python -m comparison.resume_worker`.
"""

import json
import os
import random
import shutil
import string
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.write.saver import SavedCheckpoint
from finetune.runtime.progress import Progress

from comparison.controller import run_script
from comparison.product import build, loaders
from comparison.results import Log, PartResults, Result, Spread
from comparison.workloads import Form

JOB = """\
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values:
      {hidden_size: 1024, intermediate_size: 6016, num_hidden_layers: 2, num_attention_heads: 8, num_key_value_heads: 2,
       tie_word_embeddings: true}
  tokenizer: {train: {vocabulary_size: 320}}
data: {train: {path: train.jsonl, format: text}, max_length: 128, cache_folder: cache}
task: {name: pretrain}
train: {global_batch_size: 8, microbatch_size: 8, steps: 8, learning_rate: 1e-3}
report: {console: plain}
"""
NUM_ROWS = 2000
STATE_BYTES = 524e6
"""The state for which the threshold is set: parameters and both of AdamW's moments in float32."""

STEP = 1000
LATE = 100_000
NUM_SEEKS = 25
Figures = dict[str, Any]


def measure(folder: Path, *, form: Form, log: Log) -> PartResults:
    """Return what saving, resuming and seeking cost."""
    folder = folder.resolve()
    write_job(folder, width=form.choose(6016, 6016, 64))
    figures = run_script("comparison.saving", folder, form.choose(10, 2, 1))
    found = results(figures)
    for each in found:
        log(f"{each.what}: {each.value_text}")
    checksums = {each["checksum"] for each in figures["resumes"]}
    missing = [] if len(checksums) == 1 else [f"resume: the two load different states: {sorted(checksums)}"]
    return PartResults(found, [], figures, missing)


def write_job(folder: Path, *, width: int) -> None:
    """Write a job whose state has 510 MB if its layers are 6,016 wide, and its rows."""
    draw = random.Random(1)
    rows = (" ".join(draw.choices(string.ascii_lowercase, k=draw.randint(4, 40))) for _ in range(NUM_ROWS))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB.replace("6016", str(width)))


def results(figures: Figures) -> list[Result]:
    """Return what the figures say."""
    stalls, seeks = figures["stalls"], figures["seeks"]
    share = STATE_BYTES / stalls["state_bytes"]
    ours, theirs = (
        [each["seconds"] for each in figures["resumes"] if each["way"] == way] for way in ("ours", "accelerate")
    )
    more = [1000 * (late - start) for late, start in zip(seeks["late"], seeks["start"], strict=True)]
    setting = f"{stalls['state_bytes'] / 1e6:.0f} MB, wall time, load of the machine {os.getloadavg()[0]:.1f}"
    resume = "ours verifies SHA-256 digests, begun before torch is imported; load_state verifies nothing"
    return [
        Result(
            *(6, "save: seconds that training waits per 524 MB", Spread.of([each * share for each in stalls["ours"]])),
            *(0.15, "lower", "s"),
            note=f"in the background; {setting}",
        ),
        Result(
            *(6, "resume: time to load the state, ours / accelerate.load_state", Spread.of_ratios(ours, theirs)),
            *(0.4, "lower"),
            note=f"{resume}; page cache warm, memory fresh; {setting}",
        ),
        Result(
            *(6, "seek: CPU-time to the first batch, at step 100,000 - at step 0", Spread.of(more)),
            *(1.0, "lower", "ms"),
            note="2,000 documents, shuffled, batches of 8",
        ),
    ]


def main(folder: Path, rounds: int) -> None:
    """Save, resume and seek, and leave `figures.json`."""
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
    found: Figures = {"ours": [], "accelerate": []}
    for number in range(1, rounds + 1):
        ours(Progress(step=STEP + number))
        ours.wait_for_writes()
        saved = checkpoints[-1]
        found["ours"].append(saved.stall_seconds)
        found["state_bytes"] = saved.size_bytes
        shutil.rmtree(folder / "accelerate", ignore_errors=True)
        started = time.perf_counter()
        built.prepared.accelerator.save_state(str(folder / "accelerate"))
        found["accelerate"].append(time.perf_counter() - started)
    return found


def seeks(job: Path) -> Figures:
    """Return the CPU-seconds to the first batch at the start and late in a long job."""
    loader = loaders(job, num_steps=2 * LATE)
    found: Figures = {"start": [], "late": []}
    for number in range(1 + NUM_SEEKS):  # the first warms up
        found["start"].append(_seconds_to_first(partial(loader, 0)))
        found["late"].append(_seconds_to_first(partial(loader, LATE + number)))
    return {name: seconds[1:] for name, seconds in found.items()}


def _seconds_to_first(batches: Callable[[], Any]) -> float:
    started = time.process_time()
    next(iter(batches()))
    return time.process_time() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
