"""Does this job give the same losses under every strategy? Asked by running it, a few steps each."""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from finetune.config.load import load_config
from finetune.config.run_config import RunConfig
from finetune.errors import UserError
from finetune.report.jsonl import read_events
from finetune.runtime.processes import free_port, run_group

TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True)
class Contestant:
    """One way to run the job; no accelerate config means one process without a launcher."""

    name: str
    accelerate_config: Path | None
    processes: int
    accumulation: int

    @property
    def label(self) -> str:
        """Return a name that is unique among contestants and fit for a folder."""
        return f"{self.name}-{self.processes}-accumulation-{self.accumulation}"


@dataclass(frozen=True)
class Question:
    """The job that is asked about, and how many of its steps; runs and logs go into `scratch`."""

    config: Path
    overrides: tuple[str, ...]
    job: RunConfig
    steps: int
    scratch: Path


@dataclass(frozen=True)
class Trace:
    """Loss and gradient norm of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences of a contestant from the one-process run."""

    contestant: Contestant
    loss_difference: float
    norm_difference: float
    first_bad_step: int | None  # named from 1

    @property
    def is_equal(self) -> bool:
        """Tell whether every step was within the tolerance."""
        return self.first_bad_step is None


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

    A strategy is a name in `configs_folder` or the path of an accelerate config, `:N` behind it sets its processes.
    Raises UserError when a run fails.
    """
    job = load_config(config, overrides).config
    contestants = [
        _contestant(written, job, processes=processes, accumulation=accumulation, folder=configs_folder)
        for written in strategies
        for accumulation in accumulations
    ]
    reference = Contestant("single", None, 1, job.train.global_batch_size // job.train.microbatch_size)
    with tempfile.TemporaryDirectory(prefix="finetune-parity-") as scratch:
        question = Question(config, tuple(overrides), job, steps, Path(scratch))
        wanted = _trace(reference, question)
        compared = []
        for contestant in contestants:
            compared.append(compare(contestant, wanted=wanted, got=_trace(contestant, question), tolerance=tolerance))
            print(f"{contestant.label}: {_verdict(compared[-1])}", file=sys.stderr, flush=True)
    _print_table(compared, steps=len(wanted.losses), tolerance=tolerance)
    return all(comparison.is_equal for comparison in compared)


def compare(contestant: Contestant, *, wanted: Trace, got: Trace, tolerance: float) -> Comparison:
    """Return the largest relative differences; traces of unequal length differ at the first missing step."""
    losses = _relative(wanted.losses, got.losses)
    norms = _relative(wanted.norms, got.norms)
    bad = [n for n, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1) if not max(loss, norm) <= tolerance]
    if len(wanted.losses) != len(got.losses):
        bad.append(min(len(wanted.losses), len(got.losses)) + 1)
    return Comparison(contestant, max(losses, default=0.0), max(norms, default=0.0), min(bad, default=None))


def _relative(wanted: Sequence[float], got: Sequence[float]) -> list[float]:
    return [abs(ours - theirs) / max(abs(ours), 1e-12) for ours, theirs in zip(wanted, got, strict=False)]


def _contestant(written: str, job: RunConfig, *, processes: int, accumulation: int, folder: Path) -> Contestant:
    """Return what `--strategies` means by one of its words; raises UserError for an unknown name or batch."""
    name, _, count = written.partition(":")
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
        raise UserError(f"--strategies {name}: there is no {path}. In {folder} there are: {known}.")
    world = int(count) if count.isdigit() else processes
    if job.train.global_batch_size % (world * accumulation):
        raise UserError(
            f"a global batch of {job.train.global_batch_size} cannot be shared by {world} processes x "
            f"{accumulation} accumulated. Choose another --processes, --accumulations or batch."
        )
    return Contestant(path.stem, path, world, accumulation)


def _trace(contestant: Contestant, question: Question) -> Trace:
    folder = question.scratch / contestant.label
    log = question.scratch / f"{contestant.label}.log"
    command = [*_launcher(contestant), "-m", "finetune", "--config", str(question.config)]
    for override in [*question.overrides, *_overrides(contestant, question, folder=folder)]:
        command += ["--set", override]
    code = run_group(command, log=log, timeout_seconds=TIMEOUT_SECONDS, environment={"OMP_NUM_THREADS": "1"})
    if code != 0:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-40:])
        raise UserError(f"the run under {contestant.label} ended with exit code {code}. Its last lines:\n{tail}")
    taken = [event for event in read_events(folder / "events.jsonl") if event["event"] == "StepTaken"]
    shutil.rmtree(folder)  # its checkpoint may be large
    return Trace(
        tuple(float(event["loss"]) for event in taken), tuple(float(event["gradient_norm"]) for event in taken)
    )


def _launcher(contestant: Contestant) -> list[str]:
    if contestant.accelerate_config is None:
        return [sys.executable]
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(contestant.accelerate_config)),
        *("--num_processes", str(contestant.processes)),
        *("--main_process_port", str(free_port())),
    ]


def _overrides(contestant: Contestant, question: Question, *, folder: Path) -> list[str]:
    """Return what makes the job comparable: its first steps only, no dropout, nothing else going on."""
    job = question.job
    size = job.train.global_batch_size // (contestant.processes * contestant.accumulation)
    changes = {
        "run.folder": str(folder),
        "run.strategy": "null",
        "train.microbatch_size": str(size),
        "train.stop_after_steps": str(question.steps),
        "train.early_stopping": "null",
        "evaluate": "null",
        "data.validation": "null",
        "report.trackers": "[]",
        "report.project": "null",
        "report.console": "plain",
    }
    if job.model.lora is not None:
        changes["model.lora.dropout"] = "0.0"
    return [f"{key}={value}" for key, value in changes.items()]


def _verdict(comparison: Comparison) -> str:
    return "equal" if comparison.is_equal else f"differs from step {comparison.first_bad_step}"


def _print_table(compared: Sequence[Comparison], *, steps: int, tolerance: float) -> None:
    table = Table(title=f"largest relative difference from one process over {steps} steps (tolerance {tolerance:g})")
    table.add_column("strategy")
    for column in ("processes", "accumulation", "loss", "gradient norm"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for each in compared:
        table.add_row(
            each.contestant.name,
            str(each.contestant.processes),
            str(each.contestant.accumulation),
            f"{each.loss_difference:.1e}",
            f"{each.norm_difference:.1e}",
            _verdict(each),
        )
    Console().print(table)
