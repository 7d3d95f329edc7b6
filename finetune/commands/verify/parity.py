"""`finetune verify parity`: checks that the job has the same losses under every strategy."""

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
    """The largest relative differences between a setup and the one-process run."""

    setup: LaunchSetup
    loss_difference: float
    norm_difference: float
    first_bad_step: int | None  # counted from 1

    @property
    def is_equal(self) -> bool:
        """Return whether every step was within the tolerance."""
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
        expected = _trace(reference, tested)
        compared = []
        for setup in setups:
            compared.append(compare(setup, expected=expected, actual=_trace(setup, tested), tolerance=tolerance))
            print(f"{setup.label}: {_verdict(compared[-1])}", file=sys.stderr, flush=True)
    _print_table(compared, steps=len(expected.losses), tolerance=tolerance)
    return all(comparison.is_equal for comparison in compared)


def compare(setup: LaunchSetup, *, expected: Trace, actual: Trace, tolerance: float) -> Comparison:
    """Return the largest relative differences; traces of unequal length differ at the first missing step."""
    losses = relative_differences(expected.losses, actual.losses)
    norms = relative_differences(expected.norms, actual.norms)
    bad = [n for n, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1) if not max(loss, norm) <= tolerance]
    if len(expected.losses) != len(actual.losses):
        bad.append(min(len(expected.losses), len(actual.losses)) + 1)
    return Comparison(setup, max(losses, default=0.0), max(norms, default=0.0), min(bad, default=None))


def _trace(setup: LaunchSetup, tested: TestedJob) -> Trace:
    folder = tested.scratch / setup.label
    changes = {**comparable_overrides(tested.job), "train.stop_after_steps": str(tested.steps)}
    run_job(setup, tested, folder=folder, changes=changes)
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
    for comparison in compared:
        table.add_row(
            comparison.setup.name,
            str(comparison.setup.processes),
            str(comparison.setup.accumulation),
            f"{comparison.loss_difference:.1e}",
            f"{comparison.norm_difference:.1e}",
            _verdict(comparison),
        )
    SafeConsole().print(table)
