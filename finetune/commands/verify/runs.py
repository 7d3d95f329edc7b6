"""Runs of one job under several launch setups, for comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.launch.child import end_of_log, run_child, train_command
from finetune.registry.accelerate_files import find_accelerate_file
from finetune.runtime.processes import free_port

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
    written: str, job: RunConfig, *, processes: int, folder: Path, option: str, accumulation: int | None = None
) -> LaunchSetup:
    """Return the setup of one word of an option, such as `zero3:4`; raises UserError for an unknown name or batch.

    Without an accumulation the microbatch size is the job's, or the largest below it that the processes can share.
    """
    name, _, count = written.partition(":")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        try:
            path = find_accelerate_file(name)
        except UserError as error:
            raise UserError(f"{option} {name}: {error}") from error
    if count and not (count.isdigit() and int(count)):
        raise UserError(f"{option} {written}: write the number of processes after the colon, such as {name}:2.")
    world = int(count) if count else processes
    batch = job.train.global_batch_size
    if batch % (world * (accumulation or 1)):
        raise UserError(
            f"{option} {written}: a global batch of {batch} cannot be shared by {world} processes x "
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
        port=free_port(),
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


def relative_differences(expected: Sequence[float], actual: Sequence[float]) -> list[float]:
    """Return the differences relative to the expected values, up to the end of the shorter sequence."""
    return [abs(one - other) / max(abs(one), 1e-12) for one, other in zip(expected, actual, strict=False)]
