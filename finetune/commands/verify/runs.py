"""Runs of one job under several launches whose results are compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.launch.child import run_child, train_command
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
        """Return what the user writes for it."""
        return f"{self.name}:{self.processes}"

    @property
    def label(self) -> str:
        """Return a name that is unique among contestants and fit for a folder."""
        return f"{self.name}-{self.processes}-accumulation-{self.accumulation}"


@dataclass(frozen=True)
class TestedJob:
    """The job that is asked about, and how many of its steps; runs and logs go into `scratch`."""

    config: Path
    overrides: tuple[str, ...]
    job: RunConfig
    steps: int
    scratch: Path


def parse_launch_setup(
    written: str, job: RunConfig, *, processes: int, folder: Path, option: str, accumulation: int | None = None
) -> LaunchSetup:
    """Return what one word of an option means, such as `zero3:4`; raises UserError for an unknown name or batch.

    Without an accumulation the job's own microbatch is kept, or the largest below it that the processes can share.
    """
    name, _, count = written.partition(":")
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
        raise UserError(f"{option} {name}: there is no {path}. In {folder} there are: {known}.")
    if count and not (count.isdigit() and int(count)):
        raise UserError(f"{option} {written}: write the number of processes behind the colon, such as {name}:2.")
    world = int(count) if count else processes
    batch = job.train.global_batch_size
    if batch % (world * (accumulation or 1)):
        raise UserError(
            f"{option} {written}: a global batch of {batch} cannot be shared by {world} processes x "
            f"{accumulation or 1} accumulated. Choose other numbers, or another batch with --set."
        )
    return LaunchSetup(path.stem, path, world, accumulation or _accumulation(job, share=batch // world))


def run_job(each: LaunchSetup, tested: TestedJob, *, folder: Path, changes: Mapping[str, str]) -> None:
    """Run the job in the run folder with these keys changed; raises UserError with the log's end where it fails."""
    log = folder.with_suffix(".log")
    own = {"run.folder": str(folder), "train.microbatch_size": str(_microbatch_size(each, tested.job)), **changes}
    command = train_command(
        tested.config,
        overrides=[*tested.overrides, *(f"{key}={value}" for key, value in own.items())],
        accelerate_config=each.accelerate_config,
        num_processes=each.processes,
        port=free_port(),
    )
    code = run_child(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment={"OMP_NUM_THREADS": "1"})
    if code != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise UserError(f"the run under {each.title} ended with exit code {code}. Its last lines:\n{tail}")


def comparable_overrides(job: RunConfig, *, keeps_dropout: bool = False) -> dict[str, str]:
    """Return the changes that make runs of a job comparable: no dropout, and nothing but training going on."""
    changes = {
        "run.strategy": "null",
        "run.local_folder": "null",
        "run.on_end": "null",
        "checkpoint.keep_best": "null",
        "train.early_stopping": "null",
        "evaluate": "null",
        "data.validation": "null",
        "report.trackers": "[]",
        "report.project": "null",
        "report.console": "plain",
    }
    if job.model.lora is not None and not keeps_dropout:
        changes["model.lora.dropout"] = "0.0"
    return changes


def relative_differences(wanted: Sequence[float], got: Sequence[float]) -> list[float]:
    """Return the difference at each place, relative to the wanted value; as many as the shorter one has."""
    return [abs(ours - theirs) / max(abs(ours), 1e-12) for ours, theirs in zip(wanted, got, strict=False)]


def _accumulation(job: RunConfig, *, share: int) -> int:
    size = next(size for size in range(min(job.train.known_microbatch_size, share), 0, -1) if share % size == 0)
    return share // size


def _microbatch_size(each: LaunchSetup, job: RunConfig) -> int:
    return job.train.global_batch_size // (each.processes * each.accumulation)
