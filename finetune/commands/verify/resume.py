"""`finetune verify resume`: does a run that is stopped and resumed equal one that was never stopped?"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest
from finetune.commands.verify.runs import (
    LaunchSetup,
    TestedJob,
    comparable_overrides,
    parse_launch_setup,
    read_steps,
    relative_differences,
    run_job,
)
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.report.jsonl import read_events
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.runtime.text.rich_console import SafeConsole

STEPS_AFTER_THE_STOP = 5
SHOWN_DIGITS = 12


@dataclass(frozen=True)
class RecordedStep:
    """What a run says of one step; `samples` is the rolled digest of everything consumed up to it."""

    number: int  # from 1
    samples: str
    loss: float


@dataclass(frozen=True)
class LossHistory:
    """A run from its first step to its last, over however many starts."""

    steps: tuple[RecordedStep, ...]
    starts: tuple[int, ...]  # steps that were behind it at each start
    state_sha256: str  # of its last checkpoint


def run_resume(
    config: Path,
    *,
    overrides: Sequence[str],
    stop_at: int,
    steps: int | None,
    source: str,
    target: str,
    tolerance: float,
    configs_folder: Path = Path("accelerate_configs"),
) -> bool:
    """Run the job straight under `source`, stop it at a step and resume it under `target`; return whether they agree.

    Prints both step by step, and a verdict. Under one and the same strategy the losses and the state of the last
    checkpoint have to be equal bit by bit, dropout included; else dropout is off and the losses have to be within the
    tolerance. Raises UserError when a run fails.
    """
    job = load_config(config, overrides).config
    last = stop_at + STEPS_AFTER_THE_STOP if steps is None else steps
    _refuse_too_short(job, stop_at=stop_at, last=last)
    one, other = (
        parse_launch_setup(written, job, processes=2, folder=configs_folder, option=option)
        for written, option in ((source, "--from"), (target, "--to"))
    )
    with tempfile.TemporaryDirectory(prefix="finetune-resume-") as scratch:
        question = TestedJob(config, tuple(overrides), job, last, Path(scratch))
        straight, resumed = run_both(one, other, tested=question, stop_at=stop_at)
    limit = None if one == other else tolerance
    problems = list(differences(straight, resumed, stop_at=stop_at, tolerance=limit))
    _print_table(straight, resumed, title=_title(one, other, stop_at=stop_at, is_dropout_off=limit and job.model.lora))
    _print_verdict(problems, straight=straight, resumed=resumed, tolerance=limit)
    return not problems


def run_both(
    one: LaunchSetup, other: LaunchSetup, *, tested: TestedJob, stop_at: int
) -> tuple[LossHistory, LossHistory]:
    """Return the straight course under `one`, and the one that is stopped there and resumed under the other."""
    changes = _changes(tested.job, keeps_dropout=one == other)
    folders = tested.scratch / "straight", tested.scratch / "resumed"
    runs = ((one, folders[0], tested.steps), (one, folders[1], stop_at), (other, folders[1], tested.steps))
    for each, folder, stop in runs:
        print(f"running under {each.title} to step {stop}, in {folder.name}", file=sys.stderr, flush=True)
        run_job(each, tested, folder=folder, changes={**changes, "train.stop_after_steps": str(stop)})
        if len(read_steps(folders[0])) <= stop_at:
            raise _stop_after_end(stop_at, num_steps=len(read_steps(folders[0])))
    return read_run_history(folders[0]), read_run_history(folders[1])


def read_run_history(folder: Path) -> LossHistory:
    """Return the course of the run in this folder."""
    taken = read_steps(folder)
    started = [event for event in read_events(folder / "events.jsonl") if event["event"] == "RunStarted"]
    checkpoints = list(layout.steps(folder / CHECKPOINTS_FOLDER).values())
    return LossHistory(
        tuple(RecordedStep(event["step"], event["samples_sha256"], float(event["loss"])) for event in taken),
        starts=tuple(event["step"] for event in started),
        state_sha256=read_manifest(checkpoints[-1]).state_sha256,
    )


def differences(straight: LossHistory, resumed: LossHistory, *, stop_at: int, tolerance: float | None) -> Iterator[str]:
    """Yield in words everything in which the courses differ; without a tolerance every bit counts."""
    if resumed.starts[-1] != stop_at:
        yield f"the second start went on from step {resumed.starts[-1]}, not {stop_at}"
    if len(straight.steps) != len(resumed.steps):
        yield f"straight took {len(straight.steps)} steps, resumed {len(resumed.steps)}"
    both = list(zip(straight.steps, resumed.steps, strict=False))
    other_samples = [one.number for one, other in both if one.samples != other.samples]
    if other_samples:
        yield f"other samples from step {other_samples[0]} on"
    relative = relative_differences([one.loss for one, _ in both], [other.loss for _, other in both])
    other_losses = [one.number for (one, _), each in zip(both, relative, strict=True) if not each <= (tolerance or 0.0)]
    if other_losses:
        yield f"another loss at step {other_losses[0]}" + (
            f" and {len(other_losses) - 1} more" * (len(other_losses) > 1)
        )
    if tolerance is None and straight.state_sha256 != resumed.state_sha256:
        yield "another state in the last checkpoint"


def _refuse_too_short(job: RunConfig, *, stop_at: int, last: int) -> None:
    if last <= stop_at:
        raise UserError(f"--steps {last}: nothing is left to compare after --stop-at {stop_at}. Write a larger number.")
    if job.train.steps is not None and job.train.steps <= stop_at:
        raise _stop_after_end(stop_at, num_steps=job.train.steps)


def _stop_after_end(stop_at: int, *, num_steps: int) -> UserError:
    return UserError(f"--stop-at {stop_at}: the job takes only {num_steps} steps. Write a smaller number.")


def _changes(job: RunConfig, *, keeps_dropout: bool) -> Mapping[str, str]:
    return {
        **comparable_overrides(job, keeps_dropout=keeps_dropout),
        "checkpoint.every_steps": "null",
        "checkpoint.keep_every_steps": "null",
        "checkpoint.resume": "auto",
        "train.time_limit_minutes": "null",
    }


def _title(one: LaunchSetup, other: LaunchSetup, *, stop_at: int, is_dropout_off: object) -> str:
    return f"straight under {one.title}, against stopped after step {stop_at} and resumed under {other.title}" + (
        " (dropout off)" if is_dropout_off else ""
    )


def _print_table(straight: LossHistory, resumed: LossHistory, *, title: str) -> None:
    table = Table(title=title)
    table.add_column("step", justify="right", no_wrap=True)
    for column in ("samples\nstraight", "\nresumed"):
        table.add_column(column, no_wrap=True)
    for column in ("loss\nstraight", "\nresumed", "\ndifference"):
        table.add_column(column, justify="right", no_wrap=True)
    for one, other in zip(straight.steps, resumed.steps, strict=False):
        table.add_row(
            str(one.number),
            one.samples[:SHOWN_DIGITS],
            other.samples[:SHOWN_DIGITS],
            f"{one.loss:.8f}",
            f"{other.loss:.8f}",
            f"{relative_differences([one.loss], [other.loss])[0]:.1e}",
        )
    SafeConsole().print(table)


def _print_verdict(
    problems: Sequence[str], *, straight: LossHistory, resumed: LossHistory, tolerance: float | None
) -> None:
    print(f"state of the last checkpoint: straight {straight.state_sha256 or '-'}")
    print(f"                              resumed  {resumed.state_sha256 or '-'}")
    wanted = "bit by bit" if tolerance is None else f"within {tolerance:g}"
    print(f"differs: {'; '.join(problems)}" if problems else f"equal: samples exactly, losses {wanted}")
