"""What a rehearsal proves, in numbers from the files of its run."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from finetune.checkpoint.format import layout
from finetune.checkpoint.read.inventory import find_problems, read_entry
from finetune.commands.verify.resume import CompletedRun, short_digest
from finetune.config.run_config import RunConfig
from finetune.errors import CheckpointError
from finetune.report.history import read_events
from finetune.run.setup.data import TrainingData
from finetune.runtime.resources import format_size
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER, FINAL_FOLDER

_MAX_LINES = 4


def template_evidence(config: RunConfig, data: TrainingData) -> Iterator[str]:
    """Yield how many samples, tokens and targets the rows gave, and what became of long ones."""
    for key, source in data.sources.items():
        counts = source.counts
        if not counts.rows:
            yield f"{key}: a stream, prepared while the model trains"
            continue
        yield (
            f"{key}: {counts.rows:,} rows gave {counts.samples:,} samples of {counts.tokens:,} tokens, "
            f"{counts.targets:,} of them targets"
        )
        if config.data.max_length is not None and counts.longest > config.data.max_length:
            yield (
                f"{key}: max_length {config.data.max_length:,}, longest row {counts.longest:,} tokens: "
                f"{counts.truncated_rows:,} rows truncated, {counts.split_rows:,} split, {counts.long_rows:,} dropped"
            )
    if config.data.batching.by == "packs" and data.training.order.num_positions:
        yield f"{data.training.order.num_positions:,} packs"


def strategy_evidence(run: Path) -> Iterator[str]:
    """Yield what was built on how many processes."""
    started = next(each for each in _events(run) if each["event"] == "RunStarted")
    yield str(started["strategy"])
    yield from (str(line) for line in islice(started["arithmetic"], _MAX_LINES))


def steps_evidence(run: Path) -> Iterator[str]:
    """Yield the losses, and what was evaluated and generated."""
    events = _events(run)
    taken = {each["step"]: each for each in events if each["event"] == "StepTaken"}
    losses = ", ".join(f"{each['loss']:.4f}" for each in taken.values())
    yield f"{len(taken)} steps, losses {losses}"
    evaluated = [each for each in events if each["event"] == "Evaluated"]
    if evaluated:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in islice(evaluated[-1]["metrics"].items(), 4))
        yield f"{len(evaluated)} evaluations, the last of {evaluated[-1]['num_rows']:,} rows: {metrics}"
    answers = sum(each["event"] == "Answered" for each in events)
    if answers:
        yield f"{answers} answers generated"


def checkpoint_evidence(run: Path) -> Iterator[str]:
    """Yield what the checkpoint holds, every file compared with its digest; raises CheckpointError."""
    step, path = max(layout.steps(run / CHECKPOINTS_FOLDER).items())
    problems, bad = find_problems(read_entry(path), read_all=True)
    if problems or bad:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    files = [each for each in path.rglob("*") if each.is_file()]
    size = format_size(sum(each.stat().st_size for each in files))
    yield f"step {step}: {len(files)} files, {size}, every digest as in its manifest"


def resume_evidence(resumed: CompletedRun, *, step: int) -> Iterator[str]:
    """Yield what is the same after the kill as without it."""
    steps = resumed.steps
    first = int(np.searchsorted(steps.numbers, step, side="right"))
    yield (
        f"killed, resumed from step {step}: samples, losses and the last checkpoint are bitwise those of the "
        "uninterrupted run"
    )
    samples = short_digest(steps.samples[first])
    yield f"samples of step {steps.numbers[first]}: {samples}, loss {steps.losses[first]:.6f}"
    if resumed.state_sha256:
        yield f"state after step {steps.numbers[-1]}: {resumed.state_sha256[: len(samples)]}"


def export_evidence(config: RunConfig, run: Path) -> Iterator[str]:
    """Yield what was exported and what its proof said."""
    final = run / FINAL_FOLDER
    names = sorted(path.name for path in final.iterdir())
    notes = [str(each["message"]) for each in _events(run) if each["event"] == "Noted"]
    proof = [note for note in notes if "proved" in note or "verified" in note]
    what = "merged model" if config.export.merge else "adapter" if "adapter_config.json" in names else "model"
    yield f"{what} of {len(names)} files{f': {proof[-1]}' if proof else ''}"
    yield f"final/: {', '.join(names)}"


def _events(run: Path) -> list[dict[str, Any]]:
    return read_events(run / "events.jsonl")
