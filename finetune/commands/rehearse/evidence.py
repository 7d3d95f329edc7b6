"""The evidence of a rehearsal: numbers from the files of its run."""

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
    """Yield the numbers of samples, tokens and targets of the rows, and what was done with long ones."""
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
    """Yield the strategy, the number of processes and the batch."""
    started = next(event for event in _events(run) if event["event"] == "RunStarted")
    yield str(started["strategy"])
    yield from (str(line) for line in islice(started["arithmetic"], _MAX_LINES))


def steps_evidence(run: Path) -> Iterator[str]:
    """Yield the losses, the metrics and the number of generated answers."""
    events = _events(run)
    taken = {event["step"]: event for event in events if event["event"] == "StepTaken"}
    losses = ", ".join(f"{event['loss']:.4f}" for event in taken.values())
    yield f"{len(taken)} steps, losses {losses}"
    evaluated = [event for event in events if event["event"] == "Evaluated"]
    if evaluated:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in islice(evaluated[-1]["metrics"].items(), 4))
        yield f"{len(evaluated)} evaluations, the last of {evaluated[-1]['num_rows']:,} rows: {metrics}"
    answers = sum(event["event"] == "Answered" for event in events)
    if answers:
        yield f"{answers} answers generated"


def checkpoint_evidence(run: Path) -> Iterator[str]:
    """Yield the checkpoint's size, every file compared with its digest; raises CheckpointError."""
    step, path = max(layout.steps(run / CHECKPOINTS_FOLDER).items())
    problems, bad = find_problems(read_entry(path), read_all=True)
    if problems or bad:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    files = [file for file in path.rglob("*") if file.is_file()]
    size = format_size(sum(file.stat().st_size for file in files))
    yield f"step {step}: {len(files)} files, {size}, every digest as in its manifest"


def resume_evidence(resumed: CompletedRun, *, step: int) -> Iterator[str]:
    """Yield the comparison of the resumed run with the uninterrupted one."""
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
    """Yield the files of the export and the result of its verification."""
    final = run / FINAL_FOLDER
    names = sorted(path.name for path in final.iterdir())
    notes = [str(event["message"]) for event in _events(run) if event["event"] == "Noted"]
    verified = [note for note in notes if "proved" in note or "verified" in note]
    exported = "merged model" if config.export.merge else "adapter" if "adapter_config.json" in names else "model"
    yield f"{exported} of {len(names)} files{f': {verified[-1]}' if verified else ''}"
    yield f"final/: {', '.join(names)}"


def _events(run: Path) -> list[dict[str, Any]]:
    return read_events(run / "events.jsonl")
