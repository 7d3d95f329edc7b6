"""Topic 6, saving: how long training waits for a save, how long a resume takes, and what seeking costs."""

import json
import os
import random
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison.controller import run_script
from comparison.results import Log, PartResults, Result, Spread, Table
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

Figures = Mapping[str, Any]


def measure(folder: Path, *, form: Form, log: Log) -> PartResults:
    """Return what saving, resuming and seeking cost."""
    folder = folder.resolve()
    write_job(folder)
    figures = run_script("comparison.saving_worker", folder, form.choose(10, 2, 1))
    found = results(figures)
    for each in found:
        log(f"{each.what}: {each.value_text}")
    checksums = {each["checksum"] for each in figures["resumes"]}
    missing = [] if len(checksums) == 1 else [f"resume: the two load different states: {sorted(checksums)}"]
    return PartResults(found, [table(figures)], dict(figures), missing)


def write_job(folder: Path) -> Path:
    """Write a job with 510 MB of parameters and optimizer state, and its rows; return the job's path."""
    draw = random.Random(1)
    rows = (" ".join(draw.choices(string.ascii_lowercase, k=draw.randint(4, 40))) for _ in range(NUM_ROWS))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    return folder / "job.yaml"


def results(figures: Figures) -> list[Result]:
    """Return what the figures say."""
    stalls, seeks = figures["stalls"], figures["seeks"]
    share = STATE_BYTES / stalls["state_bytes"]
    ours, theirs = (_resumes(figures, way, "seconds") for way in ("ours", "accelerate"))
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


def table(figures: Figures) -> Table:
    """Return ours beside Accelerate's."""
    stalls, seeks = figures["stalls"], figures["seeks"]
    rows = [
        ("a save stops training for, s", _text(stalls["ours"]), _text(stalls["accelerate"])),
        ("a save takes in all, s", _text(stalls["ours_total"]), _text(stalls["accelerate"])),
        *(
            (f"a resume takes, {unit}", *(_text(_resumes(figures, way, key)) for way in ("ours", "accelerate")))
            for unit, key in (("s", "seconds"), ("CPU-s", "cpu_seconds"))
        ),
        ("first batch at step 0, CPU-ms", _text(seeks["start"], 1000), ""),
        (
            f"at step 100,000; after skipping {seeks['skipped']:,}, CPU-ms",
            _text(seeks["late"], 1000),
            _text(seeks["skipping"], 1000),
        ),
    ]
    note = f"{stalls['state_bytes'] / 1e6:.0f} MB of parameters and AdamW's moments; digests are begun at the start"
    return Table("Saving, resuming, seeking", ("", "ours", "Accelerate"), rows, note)


def _resumes(figures: Figures, way: str, key: str) -> list[float]:
    return [each[key] for each in figures["resumes"] if each["way"] == way]


def _text(values: Sequence[float], factor: float = 1.0) -> str:
    return str(Spread.of([factor * each for each in values]))
