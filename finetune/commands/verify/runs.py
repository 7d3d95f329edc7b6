"""`finetune verify resume` and `parity`: a resumed run equals an uninterrupted one, and all strategies agree."""

import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint.format import layout
from finetune.checkpoint.format.manifest import read_manifest
from finetune.commands.printing import print_rows
from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.launch.child import end_of_log, run_child, train_command
from finetune.registry.accelerate_files import find_accelerate_file
from finetune.report.history import Steps, read_history
from finetune.runtime.processes import free_loopback_port
from finetune.runtime.run_folder import CHECKPOINTS_FOLDER

TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class LaunchSetup:
    """One way to run the job; no accelerate config means one process without a launcher."""

    name: str
    accelerate_config: Path | None
    processes: int
    accumulation: int

    @property
    def title(self) -> str:
        """Return the setup as the user writes it."""
        return f"{self.name}:{self.processes}"

    @property
    def label(self) -> str:
        """Return a unique name for a folder."""
        return f"{self.name}-{self.processes}-accumulation-{self.accumulation}"


@dataclass(frozen=True)
class TestedJob:
    """The job that is verified, and the number of its steps; runs and logs go into `scratch`."""

    config: Path
    overrides: tuple[str, ...]
    job: RunConfig
    steps: int
    scratch: Path


def parse_launch_setup(
    text: str, job: RunConfig, *, processes: int, folder: Path, option: str, accumulation: int | None = None
) -> LaunchSetup:
    """Return the setup of one word of an option, such as `zero3:4`; raises UserError for an unknown name or batch.

    Without an accumulation the microbatch size is the job's, or the largest below it that the processes can share.
    """
    name, _, count = text.partition(":")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        try:
            path = find_accelerate_file(name)
        except UserError as error:
            raise UserError(f"{option} {name}: {error}") from error
    if count and not (count.isdigit() and int(count)):
        raise UserError(f"{option} {text}: write the number of processes after the colon, such as {name}:2.")
    world = int(count) if count else processes
    batch = job.train.global_batch_size
    if batch % (world * (accumulation or 1)):
        raise UserError(
            f"{option} {text}: a global batch of {batch} cannot be shared by {world} processes x "
            f"{accumulation or 1} accumulated. Choose other numbers, or another batch with --set."
        )
    if accumulation is None:
        share = batch // world
        sizes = range(min(job.train.known_microbatch_size, share), 0, -1)
        accumulation = share // next(size for size in sizes if share % size == 0)
    return LaunchSetup(path.stem, path, world, accumulation)


def run_job(setup: LaunchSetup, tested: TestedJob, *, folder: Path, changes: Mapping[str, str]) -> None:
    """Run the job in the run folder with these keys changed; raises UserError with the end of the log if it fails."""
    log = folder.with_suffix(".log")
    size = tested.job.train.global_batch_size // (setup.processes * setup.accumulation)
    own = {"run.folder": str(folder), "train.microbatch_size": str(size), **changes}
    command = train_command(
        tested.config,
        overrides=[*tested.overrides, *(f"{key}={value}" for key, value in own.items())],
        accelerate_config=setup.accelerate_config,
        num_processes=setup.processes,
        port=free_loopback_port(),
    )
    code = run_child(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment={"OMP_NUM_THREADS": "1"})
    if code != 0:
        end = end_of_log(log, max_lines=40)
        raise UserError(f"the run under {setup.title} ended with exit code {code}. Its last lines:\n{end}")


def comparable_overrides(job: RunConfig, *, keeps_dropout: bool = False) -> dict[str, str]:
    """Return the changes that make runs of a job comparable: no dropout, and only training."""
    changes = {
        "run.strategy": "null",
        "run.local_folder": "null",
        "run.on_end": "null",
        "checkpoint.keep_best": "null",
        "train.early_stopping": "null",
        "evaluate": "null",
        "data.validation": "null",
        "report.trackers": "[]",
        **dict.fromkeys(("report.project", "report.run_name", "report.entity", "report.group"), "null"),
        "report.tags": "[]",
        "report.console": "plain",
    }
    if job.model.lora is not None and not keeps_dropout:
        changes["model.lora.dropout"] = "0.0"
    return changes


def relative_difference(expected: float, actual: float, *, floor: float = 0.0) -> float:
    """Return the difference relative to the expected number, or to the floor; 0 for two that are not finite alike."""
    if expected == actual or (math.isnan(expected) and math.isnan(actual)):
        return 0.0
    return abs(expected - actual) / max(abs(expected), floor, 1e-30)


def relative_differences(expected: Sequence[float], actual: Sequence[float]) -> list[float]:
    """Return the differences relative to the expected values, up to the end of the shorter sequence."""
    return list(map(relative_difference, expected, actual))


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
        changes = {
            **comparable_overrides(job, keeps_dropout=one == other),
            **dict.fromkeys(("checkpoint.every_steps", "checkpoint.keep_every_steps"), "null"),
            "checkpoint.resume": "auto",
            "train.time_limit_minutes": "null",
        }
        folders = tested.scratch / "straight", tested.scratch / "resumed"
        for setup, folder, stop in ((one, folders[0], last), (one, folders[1], stop_at), (other, folders[1], last)):
            print(f"running under {setup.title} to step {stop}, in {folder.name}", file=sys.stderr, flush=True)
            run_job(setup, tested, folder=folder, changes={**changes, "train.stop_after_steps": str(stop)})
            num_steps = len(read_history(folders[0]).steps)
            if num_steps <= stop_at:
                raise _stop_after_end(stop_at, num_steps=num_steps)
        straight, resumed = map(read_completed_run, folders)
    limit = None if one == other else tolerance
    problems = list(run_differences(straight, resumed, stop_at=stop_at, tolerance=limit))
    title = f"straight under {one.title}, against stopped after step {stop_at} and resumed under {other.title}"
    _print_table(straight, resumed, title=title + (" (dropout off)" if limit and job.model.lora else ""))
    print(f"state of the last checkpoint: straight {straight.state_sha256 or '-'}")
    print(f"                              resumed  {resumed.state_sha256 or '-'}")
    precision = "bitwise" if limit is None else f"within {limit:g}"
    print(f"differs: {'; '.join(problems)}" if problems else f"equal: samples exactly, losses {precision}")
    return not problems


def read_completed_run(folder: Path) -> CompletedRun:
    """Return the run in this folder."""
    history = read_history(folder)
    checkpoints = list(layout.steps(folder / CHECKPOINTS_FOLDER).values())
    return CompletedRun(
        history.steps,
        starts=tuple(event["step"] for event in history.starts),
        state_sha256=read_manifest(checkpoints[-1]).state_sha256,
    )


def run_differences(
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


def _print_table(straight: CompletedRun, resumed: CompletedRun, *, title: str) -> None:
    one, other = straight.steps, resumed.steps
    differences = relative_differences(one.losses.tolist(), other.losses.tolist())
    print(title)
    print_rows(
        ("step", "samples straight", "resumed", "loss straight", "resumed", "difference"),
        *(
            (
                str(one.numbers[n]),
                *(short_digest(steps.samples[n]) for steps in (one, other)),
                *(f"{steps.losses[n]:.8f}" for steps in (one, other)),
                f"{difference:.1e}",
            )
            for n, difference in enumerate(differences)
        ),
    )


@dataclass(frozen=True)
class ParityResult:
    """The largest relative differences between a setup and the one-process run."""

    setup: LaunchSetup
    loss_difference: float
    norm_difference: float
    first_bad_step: int | None  # counted from 1

    @property
    def verdict(self) -> str:
        """Return whether every step was within the tolerance, or the first one that was not."""
        return "equal" if self.first_bad_step is None else f"differs from step {self.first_bad_step}"


def run_parity(
    config: Path,
    *,
    overrides: Sequence[str],
    strategies: Sequence[str],
    processes: int,
    steps: int,
    tolerance: float,
    accumulations: Sequence[int] = (1,),
    configs_folder: Path = Path("accelerate_configs"),
) -> bool:
    """Run the job on one process and under each strategy, print the table, return whether all agree.

    A strategy is a name in `configs_folder` or the path of an accelerate config; a suffix `:N` sets its processes.
    Raises UserError when a run fails.
    """
    job = load_config(config, overrides).config
    setups = [
        parse_launch_setup(
            strategy,
            job,
            processes=processes,
            accumulation=accumulation,
            folder=configs_folder,
            option="--strategies",
        )
        for strategy in strategies
        for accumulation in accumulations
    ]
    reference = LaunchSetup("single", None, 1, job.train.global_batch_size // job.train.known_microbatch_size)
    with tempfile.TemporaryDirectory(prefix="finetune-parity-") as scratch:
        tested = TestedJob(config, tuple(overrides), job, steps, Path(scratch))
        expected = _take_steps(reference, tested)
        compared = []
        for setup in setups:
            actual = _take_steps(setup, tested)
            compared.append(compare_steps(setup, expected=expected, actual=actual, tolerance=tolerance))
            print(f"{setup.label}: {compared[-1].verdict}", file=sys.stderr, flush=True)
    print(f"largest relative difference from one process over {len(expected)} steps (tolerance {tolerance:g})")
    print_rows(
        ("strategy", "processes", "accumulation", "loss", "gradient norm", "verdict"),
        *(
            (
                *(result.setup.name, str(result.setup.processes), str(result.setup.accumulation)),
                *(f"{result.loss_difference:.1e}", f"{result.norm_difference:.1e}", result.verdict),
            )
            for result in compared
        ),
    )
    return all(result.first_bad_step is None for result in compared)


def compare_steps(setup: LaunchSetup, *, expected: Steps, actual: Steps, tolerance: float) -> ParityResult:
    """Return the largest relative differences; of unequal numbers of steps, the first missing one differs."""
    losses, norms = (
        relative_differences(*(steps.values(name).tolist() for steps in (expected, actual)))
        for name in ("loss", "gradient_norm")
    )
    pairs = enumerate(zip(losses, norms, strict=True), start=1)
    bad = [number for number, pair in pairs if not all(size <= tolerance for size in pair)]
    if len(expected) != len(actual):
        bad.append(min(len(expected), len(actual)) + 1)
    return ParityResult(setup, max(losses, default=0.0), max(norms, default=0.0), min(bad, default=None))


def _take_steps(setup: LaunchSetup, tested: TestedJob) -> Steps:
    folder = tested.scratch / setup.label
    changes = {**comparable_overrides(tested.job), "train.stop_after_steps": str(tested.steps)}
    run_job(setup, tested, folder=folder, changes=changes)
    steps = read_history(folder).steps
    shutil.rmtree(folder)  # its checkpoint may be large
    return steps
