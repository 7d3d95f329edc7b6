"""Gate 6, saving: how long training waits for a save, how long a resume takes, and what seeking costs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_job import JOB, write_job

from contest.evaluation import run_worker
from contest.finding import Finding, Spread
from contest.measured import Measured, Say, Table

TINY_SIZES = "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4"
SIZES = "{hidden_size: 1024, intermediate_size: 6016, num_hidden_layers: 2, num_attention_heads: 8"
STATE_BYTES = 524e6
"""The state for which the gate is written: parameters and both of AdamW's moments in float32."""

Figures = Mapping[str, Any]


def measure(folder: Path, *, is_quick: bool, say: Say) -> Measured:
    """Return what gate 6 says of saving, resuming and seeking."""
    folder = folder.resolve()
    job = write_job(folder, num_rows=2000)
    assert TINY_SIZES in JOB, JOB
    job.write_text(JOB.replace(TINY_SIZES, SIZES))
    figures = run_worker("saving_rounds.py", folder, 2 if is_quick else 10)
    found = findings(figures)
    for each in found:
        say(f"{each.what}: {each.spread} {each.unit}")
    digests = {each["digest"] for each in figures["resumes"]}
    missing = [] if len(digests) == 1 else [f"gate 6, resume: both load something else: {sorted(digests)}"]
    return Measured(found, [table(figures)], dict(figures), missing)


def findings(figures: Figures) -> list[Finding]:
    """Return what the figures say."""
    stalls, seeks = figures["stalls"], figures["seeks"]
    share = STATE_BYTES / stalls["state_bytes"]
    ours, theirs = (_resumes(figures, way, "seconds") for way in ("ours", "accelerate"))
    more = [1000 * (late - start) for late, start in zip(seeks["late"], seeks["start"], strict=True)]
    setting = f"{stalls['state_bytes'] / 1e6:.0f} MB, wall time, load of the machine {os.getloadavg()[0]:.1f}"
    resume = "ours verifies SHA-256 digests, begun before torch is imported; load_state verifies nothing"
    return [
        Finding(
            *(6, "save: seconds that training waits per 524 MB", Spread.of([each * share for each in stalls["ours"]])),
            *(0.15, "lower", "s"),
            note=f"written behind the training; {setting}",
        ),
        Finding(
            *(6, "resume: time to load the state, ours / accelerate.load_state", Spread.of_ratios(ours, theirs)),
            *(0.4, "lower"),
            note=f"{resume}; page cache warm, memory fresh; {setting}",
        ),
        Finding(
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
