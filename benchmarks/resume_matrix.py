"""What one strategy has saved another continues: each pair through the whole application, printed as a table.

    python benchmarks/resume_matrix.py [--variant full|lora|both] [--only zero3:2,ddp:4] [--jobs 2] [--folder PATH]

Each source runs straight to the end and keeps a checkpoint on the way; each target continues from it in a folder of
its own. Losses must be within the tolerance of the source's and the samples the same; a place that continues itself
must give the same bits. Exit code 1 when a pair fails. With --folder, pairs that are done there are not run again.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from tiny_job import LORA, write_job

from finetune.commands.verify.resume import RunHistory, differences, read_run_history
from finetune.commands.verify.runs import (
    TestedJob,
    comparable_overrides,
    parse_launch_setup,
    relative_differences,
    run_job,
)
from finetune.config.load import load_config
from finetune.errors import UserError

T = TypeVar("T")

ALL_PAIRS_OF = ("ddp:1", "fsdp2:2", "zero2:2", "zero3:2", "fsdp2:4")
RING = ("ddp:2", "zero1:2", "fsdp1:2", "zero3:4", "hsdp:4", "zero2_offload:2", "ddp:4")
"""Each goes on to the next, the last to the first."""
PLACES = (*ALL_PAIRS_OF, *RING)
PAIRS = (
    *((source, target) for source in ALL_PAIRS_OF for target in ALL_PAIRS_OF),
    *zip(RING, (*RING[1:], RING[0]), strict=True),
)
VARIANTS = {"full": (), "lora": (LORA % 0.0,)}

STOP_AT, STEPS = 4, 7  # 22 rows in batches of 8: the stop is in epoch 2, between two epochs' ends
TOLERANCE = 1e-4
CONFIGS = Path(__file__).parents[1] / "accelerate_configs"


@dataclass(frozen=True)
class Result:
    """How a target went on with what a source had saved."""

    variant: str
    source: str
    target: str
    difference: float  # the largest of the losses, relative
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """The job in one variant, and where its runs lie."""

    variant: str
    question: TestedJob

    def run_straight(self, place: str) -> None:
        """Run a source to its end, unless that has been done; where it fails, so do the pairs that start from it."""
        every = {"checkpoint.every_steps": str(STOP_AT), "checkpoint.keep_every_steps": str(STOP_AT)}
        try:
            self._run(place, self._folder(place), changes=every)
        except UserError as error:
            print(error, file=sys.stderr)

    def run_pair(self, source: str, target: str) -> Result:
        """Continue a source's checkpoint under a target and compare."""
        folder = self._folder(f"{source}-to-{target}")
        checkpoint = self._folder(source) / "checkpoints" / f"step-{STOP_AT:06d}"
        try:
            self._run(target, folder, changes={"checkpoint.resume": str(checkpoint)})
        except UserError as error:
            return Result(self.variant, source, target, float("nan"), (str(error),))
        whole, resumed = read_run_history(self._folder(source)), read_run_history(folder)
        straight = RunHistory(whole.steps[STOP_AT:], whole.starts, whole.state_sha256)
        tolerance = None if source == target else TOLERANCE
        problems = tuple(differences(straight, resumed, stop_at=STOP_AT, tolerance=tolerance))
        losses = [[step.loss for step in course.steps] for course in (straight, resumed)]
        return Result(self.variant, source, target, max(relative_differences(*losses)), problems)

    def _run(self, place: str, folder: Path, *, changes: dict[str, str]) -> None:
        if (folder / "final").exists():
            return
        job = self.question.job
        one = parse_launch_setup(place, job, processes=1, folder=CONFIGS, option="place")
        run_job(one, self.question, folder=folder, changes={**comparable_overrides(job), **changes})

    def _folder(self, name: str) -> Path:
        return self.question.scratch / self.variant / name.replace(":", "-")


def main() -> int:
    """Run what is asked for, print what there is, and return 1 unless all of it has passed."""
    options = _options()
    with tempfile.TemporaryDirectory(prefix="finetune-matrix-") as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        config = write_job(folder)
        variants = VARIANTS if options.variant == "both" else {options.variant: VARIANTS[options.variant]}
        matrices = []
        for variant, changes in variants.items():
            overrides = (*changes, f"train.steps={STEPS}")
            job = load_config(config, overrides).config
            matrices.append(Matrix(variant, TestedJob(config, overrides, job, STEPS, folder)))
        results = _run_all(matrices, _wanted(options.only), jobs=options.jobs)
    for matrix in matrices:
        _print_table([each for each in results if each.variant == matrix.variant], variant=matrix.variant)
    failed = [each for each in results if each.problems]
    for each in failed:
        print(f"{each.variant} {each.source} -> {each.target}: {'; '.join(each.problems)}")
    num_wanted = len(matrices) * len(_wanted(options.only))
    print(f"{len(results) - len(failed)} of {num_wanted} pairs passed, {num_wanted - len(results)} were not run")
    return int(bool(failed) or len(results) < num_wanted)


def _run_all(matrices: list[Matrix], pairs: list[tuple[str, str]], *, jobs: int) -> list[Result]:
    """Return the results; of those that were ready when the user interrupted, where that happens."""
    results: list[Result] = []
    sources = list(dict.fromkeys(source for source, _ in pairs))
    with ThreadPoolExecutor(jobs) as pool:
        try:
            straight = [pool.submit(matrix.run_straight, place) for matrix in matrices for place in sources]
            _each(straight, lambda _: None)
            running = [pool.submit(matrix.run_pair, *pair) for matrix in matrices for pair in pairs]
            _each(running, results.append)
        except KeyboardInterrupt:
            print("interrupted; what is running is waited for", file=sys.stderr)
            pool.shutdown(cancel_futures=True)
    return results


def _each(futures: Iterable["Future[T]"], take: Callable[[T], object]) -> None:
    for future in as_completed(list(futures)):
        result = future.result()
        take(result)
        if isinstance(result, Result):
            print(json.dumps(asdict(result)), file=sys.stderr, flush=True)


def _wanted(only: str | None) -> list[tuple[str, str]]:
    places = only.split(",") if only else PLACES
    return [pair for pair in PAIRS if set(pair) & set(places)]


def _print_table(results: list[Result], *, variant: str) -> None:
    """Print source by target: the largest relative difference of a loss, `=` where every bit is the same."""
    table = Table(title=f"{variant}: largest relative difference of a loss after step {STOP_AT} (= every bit)")
    table.add_column("from \\ to", no_wrap=True)
    for target in PLACES:
        table.add_column(target, justify="right", no_wrap=True)
    cells = {(each.source, each.target): _cell(each) for each in results}
    for source in PLACES:
        table.add_row(source, *(cells.get((source, target), "") for target in PLACES))
    Console(width=180).print(table)


def _cell(result: Result) -> str:
    if result.problems:
        return f"[red]FAILED {result.difference:.0e}[/red]"
    return "=" if result.source == result.target else f"{result.difference:.0e}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=[*VARIANTS, "both"], default="both")
    parser.add_argument("--only", help="places; pairs with at least one of them are run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--folder", type=Path, help="where the runs are kept; unset, a folder that is removed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
