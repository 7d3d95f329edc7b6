"""`finetune verify parity`: does the job give the same losses under every strategy?"""

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from finetune.commands.verify.runs import (
    LaunchSetup,
    TestedJob,
    comparable_overrides,
    parse_launch_setup,
    relative_differences,
    run_job,
)
from finetune.config.load import load_config
from finetune.report.history import read_history
from finetune.runtime.text.rich_console import SafeConsole


@dataclass(frozen=True)
class Trace:
    """Loss and gradient norm of each step."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """The largest relative differences of a contestant from the one-process run."""

    contestant: LaunchSetup
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
        parse_launch_setup(
            written,
            job,
            processes=processes,
            accumulation=accumulation,
            folder=configs_folder,
            option="--strategies",
        )
        for written in strategies
        for accumulation in accumulations
    ]
    reference = LaunchSetup("single", None, 1, job.train.global_batch_size // job.train.known_microbatch_size)
    with tempfile.TemporaryDirectory(prefix="finetune-parity-") as scratch:
        question = TestedJob(config, tuple(overrides), job, steps, Path(scratch))
        wanted = _trace(reference, question)
        compared = []
        for each in contestants:
            compared.append(compare(each, wanted=wanted, got=_trace(each, question), tolerance=tolerance))
            print(f"{each.label}: {_verdict(compared[-1])}", file=sys.stderr, flush=True)
    _print_table(compared, steps=len(wanted.losses), tolerance=tolerance)
    return all(comparison.is_equal for comparison in compared)


def compare(each: LaunchSetup, *, wanted: Trace, got: Trace, tolerance: float) -> Comparison:
    """Return the largest relative differences; traces of unequal length differ at the first missing step."""
    losses = relative_differences(wanted.losses, got.losses)
    norms = relative_differences(wanted.norms, got.norms)
    bad = [n for n, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1) if not max(loss, norm) <= tolerance]
    if len(wanted.losses) != len(got.losses):
        bad.append(min(len(wanted.losses), len(got.losses)) + 1)
    return Comparison(each, max(losses, default=0.0), max(norms, default=0.0), min(bad, default=None))


def _trace(each: LaunchSetup, tested: TestedJob) -> Trace:
    folder = tested.scratch / each.label
    changes = {**comparable_overrides(tested.job), "train.stop_after_steps": str(tested.steps)}
    run_job(each, tested, folder=folder, changes=changes)
    steps = read_history(folder).steps
    shutil.rmtree(folder)  # its checkpoint may be large
    return Trace(tuple(steps.losses.tolist()), tuple(steps.values("gradient_norm").tolist()))


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
    SafeConsole().print(table)
