"""A sweep that is killed in the middle and continued ends as one that is not: same samples, losses and final states.

    python benchmarks/sweep_kills.py FOLDER [--accelerate accelerate_configs/ddp.yaml] [--lora] [--at-once 2]

Runs the sweep once undisturbed; then once for each kill (the sweep with SIGKILL, the sweep with SIGTERM, one of its
runs with SIGKILL), continues it with the same command, and compares every run. Exit code 1 unless all are equal.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from finetune.commands.verify.resume import differences, read_completed_run
from finetune.report.history import read_events
from finetune.runtime.supervision.writer_lock import is_locked

JOB = """
run: {folder: runs/job, seed: 7}
model:
  from_config:
    model_type: llama
    values: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
  tokenizer: {train: {vocabulary_size: 320}}
data:
  train: {path: train.jsonl}
  validation: {path: held_out.jsonl}
  max_length: 128
  chat_template: chatml
  cache_folder: cache
task: {name: sft}
train: {global_batch_size: 8, microbatch_size: 4, steps: 400, learning_rate: 1e-2}
checkpoint: {every_steps: 50}
evaluate: {every_steps: 100}
report: {console: plain, log_every_steps: 50}
export: {verify: false}
"""
LORA = "model.lora={rank: 4, alpha: 8.0, dropout: 0.1}"
AXES = ("train.learning_rate=1e-2,2e-2,4e-2", "train.schedule.name=cosine,constant")
WORDS = ("red", "green", "blue", "amber", "violet", "white", "black", "grey", "pink", "brown")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--accelerate")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--axis", action="append", default=None)
    options = parser.parse_args()
    folder = options.folder.absolute()
    write_job(folder)
    words = [word for text in [*(options.axis or AXES), *([LORA] if options.lora else [])] for word in ("--set", text)]
    words += ["--at-once", str(options.at_once), *(["--accelerate", options.accelerate] if options.accelerate else [])]
    reference = folder / "undisturbed"
    assert start(folder, reference, words).wait() == 0
    kills = {"sweep-killed": kill_sweep, "sweep-terminated": terminate_sweep, "run-killed": kill_run}
    problems = [problem for name, kill in kills.items() for problem in disturb(folder, name, kill, reference, words)]
    print("\n".join(problems) or "all runs equal those of the undisturbed sweep")
    return int(bool(problems))


def write_job(folder):
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(1)
    for name, count in (("train.jsonl", 200), ("held_out.jsonl", 8)):
        (folder / name).write_text("".join(json.dumps(row(chance)) + "\n" for _ in range(count)))
    (folder / "job.yaml").write_text(JOB)


def row(chance):
    words = chance.choices(WORDS, k=chance.randint(1, 8))
    return {"prompt": f"reverse: {' '.join(words)}", "completion": " ".join(reversed(words))}


def start(folder, sweep, words):
    command = [sys.executable, "-m", "finetune", "sweep", "--config", str(folder / "job.yaml"), "--folder", str(sweep)]
    with (folder / f"{sweep.name}.log").open("ab") as log:
        return subprocess.Popen([*command, *words], stdout=log, stderr=log)


def disturb(folder, name, kill, reference, words):
    """Start the sweep, kill something in the middle, continue; yield every difference from the undisturbed one."""
    sweep = folder / name
    process = start(folder, sweep, words)
    while True:  # the third run, or the second pair, is in the middle of its steps
        time.sleep(0.02)
        going = [run for run in runs(sweep) if is_locked(run) and 100 < last_step(run) < 300]
        if going and sum(status(run).get("state") == "finished" for run in runs(sweep)) >= 2:
            break
        assert process.poll() is None, f"{name}: the sweep ended before it could be killed"
    step, code = last_step(going[0]), kill(process, going[0])
    print(
        f"{name}: killed at step {step} of {going[0].name}; exit code {code}; orphans: {wait_for_orphans(sweep):.1f} s"
    )
    before = {run.name: last_step(run) for run in runs(sweep)}
    assert start(folder, sweep, words).wait() == 0, f"{name}: see {folder / f'{name}.log'}"
    for run in sorted(runs(reference)):
        same, other = read_completed_run(run), read_completed_run(sweep / "runs" / run.name)
        taken = [event["step"] for event in events(sweep / "runs" / run.name, "StepTaken")]
        repeated = len(taken) - len(set(taken))
        digest = other.state_sha256[:12]
        print(f"  {run.name}: {len(other.steps)} steps, starts {other.starts}, {repeated} repeated, state {digest}")
        if any(differences(same, other, stop_at=other.starts[-1], tolerance=None)):
            yield f"{name}: {run.name} differs"
        if repeated and name != "run-killed":
            yield f"{name}: {run.name} took {repeated} steps twice"
        if status(run).get("state") == "finished" and before.get(run.name) == len(same.steps) and len(other.starts) > 1:
            yield f"{name}: {run.name} was finished and has been started again"


def kill_sweep(process, run):
    process.kill()
    return process.wait()


def terminate_sweep(process, run):
    process.send_signal(signal.SIGTERM)
    return process.wait()


def kill_run(process, run):
    for peer in status(run)["ranks"]:
        os.kill(peer["pid"], signal.SIGKILL)
    return process.wait()


def wait_for_orphans(sweep):
    """Return the seconds until no process of the sweep is left."""
    began = time.monotonic()
    while any(str(sweep / "runs") in " ".join(command(each)) for each in psutil.process_iter()):
        assert time.monotonic() - began < 60, "orphans"
        time.sleep(0.05)
    return time.monotonic() - began


def command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def runs(sweep):
    return list((sweep / "runs").glob("*"))


def status(run):
    try:
        return json.loads((run / "status.json").read_text())
    except (OSError, ValueError):
        return {}


def events(run, name):
    path = run / "events.jsonl"
    return [event for event in read_events(path) if event["event"] == name] if path.exists() else []


def last_step(run):
    return max((event["step"] for event in events(run, "StepTaken")), default=0)


if __name__ == "__main__":
    sys.exit(main())
