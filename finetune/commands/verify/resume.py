"""`finetune verify resume`: checks that a stopped and resumed run equals an uninterrupted one."""

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
    relative_differences,
    run_job,
)
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.report.history import Steps, read_history
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER
from finetune.runtime.text.rich_console import SafeConsole

STEPS_AFTER_THE_STOP = 5
_SHOWN_DIGITS = 12


@dataclass(frozen=True)
class CompletedRun:
    """A run from its first to its last step, over any number of starts."""

    steps: Steps
    starts: tuple[int, ...]  # the steps that had been taken at each start
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
    """Compare an uninterrupted run under `source` with one that is stopped and resumes under `target`.

    Prints both step by step, and returns whether they agree. Under the same strategy the losses and the state of the
    last checkpoint must be bitwise equal, dropout included; otherwise dropout is off and the losses must be within the
    tolerance. Raises UserError when a run fails.
    """
    job = load_config(config, overrides).config
    last = stop_at + STEPS_AFTER_THE_STOP if steps is None else steps
    if last <= stop_at:
        raise UserError(f"--steps {last}: nothing is left to compare after --stop-at {stop_at}. Write a larger number.")
    if job.train.steps is not None and job.train.steps <= stop_at:
        raise _stop_after_end(stop_at, num_steps=job.train.steps)
    one, other = (
        parse_launch_setup(text, job, processes=2, folder=configs_folder, option=option)
        for text, option in ((source, "--from"), (target, "--to"))
    )
    with tempfile.TemporaryDirectory(prefix="finetune-resume-") as scratch:
        tested = TestedJob(config, tuple(overrides), job, last, Path(scratch))
        straight, resumed = run_both(one, other, tested=tested, stop_at=stop_at)
    limit = None if one == other else tolerance
    problems = list(differences(straight, resumed, stop_at=stop_at, tolerance=limit))
    _print_table(straight, resumed, title=_title(one, other, stop_at=stop_at, is_dropout_off=limit and job.model.lora))
    print(f"state of the last checkpoint: straight {straight.state_sha256 or '-'}")
    print(f"                              resumed  {resumed.state_sha256 or '-'}")
    precision = "bitwise" if limit is None else f"within {limit:g}"
    print(f"differs: {'; '.join(problems)}" if problems else f"equal: samples exactly, losses {precision}")
    return not problems


def run_both(
    one: LaunchSetup, other: LaunchSetup, *, tested: TestedJob, stop_at: int
) -> tuple[CompletedRun, CompletedRun]:
    """Return the uninterrupted run under `one`, and the run that is stopped and resumes under `other`."""
    changes = _changes(tested.job, keeps_dropout=one == other)
    folders = tested.scratch / "straight", tested.scratch / "resumed"
    runs = ((one, folders[0], tested.steps), (one, folders[1], stop_at), (other, folders[1], tested.steps))
    for setup, folder, stop in runs:
        print(f"running under {setup.title} to step {stop}, in {folder.name}", file=sys.stderr, flush=True)
        run_job(setup, tested, folder=folder, changes={**changes, "train.stop_after_steps": str(stop)})
        num_steps = len(read_history(folders[0]).steps)
        if num_steps <= stop_at:
            raise _stop_after_end(stop_at, num_steps=num_steps)
    return read_completed_run(folders[0]), read_completed_run(folders[1])


def read_completed_run(folder: Path) -> CompletedRun:
    """Return the run in this folder."""
    history = read_history(folder)
    checkpoints = list(layout.steps(folder / CHECKPOINTS_FOLDER).values())
    return CompletedRun(
        history.steps,
        starts=tuple(event["step"] for event in history.starts),
        state_sha256=read_manifest(checkpoints[-1]).state_sha256,
    )


def differences(
    straight: CompletedRun, resumed: CompletedRun, *, stop_at: int, tolerance: float | None
) -> Iterator[str]:
    """Yield a phrase for every difference between the runs; without a tolerance they must be bitwise equal."""
    if resumed.starts[-1] != stop_at:
        yield f"the second start resumed from step {resumed.starts[-1]}, not {stop_at}"
    if len(straight.steps) != len(resumed.steps):
        yield f"straight took {len(straight.steps)} steps, resumed {len(resumed.steps)}"
    num_common = min(len(straight.steps), len(resumed.steps))
    numbers = straight.steps.numbers[:num_common]
    other_samples = numbers[straight.steps.samples[:num_common] != resumed.steps.samples[:num_common]]
    if len(other_samples):
        yield f"other samples from step {other_samples[0]} on"
    relative = relative_differences(straight.steps.losses.tolist(), resumed.steps.losses.tolist())
    other_losses = [number for number, size in zip(numbers, relative, strict=True) if not size <= (tolerance or 0.0)]
    if len(other_losses):
        more = f" and {len(other_losses) - 1} more" if len(other_losses) > 1 else ""
        yield f"another loss at step {other_losses[0]}{more}"
    if tolerance is None and straight.state_sha256 != resumed.state_sha256:
        yield "another state in the last checkpoint"


def short_digest(samples: int) -> str:
    """Return the first digits of a digest, as in events.jsonl."""
    return f"{samples:016x}"[:_SHOWN_DIGITS]


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


def _print_table(straight: CompletedRun, resumed: CompletedRun, *, title: str) -> None:
    table = Table(title=title)
    table.add_column("step", justify="right", no_wrap=True)
    for column in ("samples\nstraight", "\nresumed"):
        table.add_column(column, no_wrap=True)
    for column in ("loss\nstraight", "\nresumed", "\ndifference"):
        table.add_column(column, justify="right", no_wrap=True)
    losses, resumed_losses = straight.steps.losses.tolist(), resumed.steps.losses.tolist()
    samples, resumed_samples = straight.steps.samples, resumed.steps.samples
    for index, difference in enumerate(relative_differences(losses, resumed_losses)):
        table.add_row(
            str(straight.steps.numbers[index]),
            short_digest(samples[index]),
            short_digest(resumed_samples[index]),
            f"{losses[index]:.8f}",
            f"{resumed_losses[index]:.8f}",
            f"{difference:.1e}",
        )
    SafeConsole().print(table)
