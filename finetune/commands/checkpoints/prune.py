"""`finetune checkpoint prune`: which checkpoints would be deleted under which settings, and deleting them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from finetune.checkpoint.read.inventory import CheckpointEntry, find_problems, locate_run, read_entries
from finetune.checkpoint.write.retention import best_steps, delete_checkpoints, removable_steps
from finetune.commands.checkpoints.tables import prune_table
from finetune.commands.printing import print_table, width
from finetune.config.load import RESOLVED_NAME, load_resolved
from finetune.config.sections.checkpoint import CheckpointSection, KeepBestSection
from finetune.errors import CheckpointError, UserError
from finetune.runtime.resources import format_size
from finetune.runtime.supervision.writer_lock import lock_run_folder

GOALS = ("minimize", "maximize")


@dataclass(frozen=True)
class Verdict:
    """What happens to one checkpoint, and why it stays where it does."""

    entry: CheckpointEntry
    reasons: tuple[str, ...]  # none: it goes

    @property
    def is_deleted(self) -> bool:
        """Tell whether it is to be deleted."""
        return not self.reasons


def prune(
    run: Path, *, keep_last: int | None, keep_every: int | None, keep_best: str | None, does_delete: bool
) -> None:
    """Print which checkpoints stay and why, and delete the others where that is wanted.

    What is not given is as the run's own settings say. The newest good checkpoint stays whatever they say, and bad ones
    are not touched. Raises UserError while a run holds the folder, CheckpointError where no checkpoint is good or
    one could not be deleted. What an earlier pruning has left half deleted goes, too.
    """
    place = locate_run(run)
    if place.chosen is not None:
        raise UserError(f"{run}: this is one checkpoint. Name the run whose checkpoints are to be thinned out.")
    section = with_options(retention_of(place.run), keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    with lock_run_folder(place.run, log=print) if does_delete else nullcontext():
        verdicts = decide(read_entries(place.checkpoints), section)
        rows = [(each.entry, each.reasons) for each in verdicts]
        print_table(prune_table(rows, now=time.time(), width=width()))
        going = [each.entry for each in verdicts if each.is_deleted]
        size = format_size(sum(entry.manifest.size_bytes for entry in going if entry.manifest))
        if does_delete and (trouble := delete_checkpoints(place.checkpoints, [entry.step for entry in going])):
            raise CheckpointError("\n".join(trouble))
    if not going:
        print("Nothing has to go.")
    elif does_delete:
        print(f"deleted {len(going)}, {size}")
    else:
        print(f"{len(going)} would go, {size}. Nothing was deleted: `--yes` does it.")


def retention_of(run: Path) -> CheckpointSection:
    """Return what the run keeps by its own settings, or the defaults where its folder does not tell."""
    if (run / RESOLVED_NAME).is_file():
        return load_resolved(run).config.checkpoint
    print(f"there is no {run / RESOLVED_NAME}, so what is not given is as by default")
    return CheckpointSection()


def with_options(
    section: CheckpointSection, *, keep_last: int | None, keep_every: int | None, keep_best: str | None
) -> CheckpointSection:
    """Return the section with what was given laid over it."""
    given = {
        "keep_last": keep_last,
        "keep_every_steps": keep_every,
        "keep_best": parse_keep_best(keep_best) if keep_best is not None else None,
    }
    return section.model_copy(update={name: value for name, value in given.items() if value is not None})


def parse_keep_best(written: str) -> KeepBestSection:
    """Return what `METRIC[:minimize|maximize][:COUNT]` means; raises UserError for anything else.

    >>> best_of("exact_match:maximize:3").count
    3
    """
    metric, *rest = written.split(":")
    goal = rest.pop(0) if rest and rest[0] in GOALS else "minimize"
    count = rest.pop(0) if rest else "1"
    if not metric or rest or not count.isdigit() or int(count) == 0:
        raise UserError(
            f"--keep-best {written}: write a metric, such as `loss`, `loss:2` for the two best, or "
            "`exact_match:maximize`."
        )
    return KeepBestSection.model_validate({"metric": metric, "goal": goal, "count": int(count)})


def decide(entries: Sequence[CheckpointEntry], section: CheckpointSection) -> list[Verdict]:
    """Return for each checkpoint why it stays, or that it goes; raises CheckpointError where none is good.

    The newest and the best are read and digested: one that turns out bad gives its place to the next.
    """
    bad = {entry.step for entry in entries if _is_bad(entry, read_all=False)}
    by_step = {entry.step: entry for entry in entries}
    read: set[int] = set()
    while True:
        good = [step for step in by_step if step not in bad]
        if not good:
            raise CheckpointError("no checkpoint is good, so none is deleted. `finetune checkpoint verify` says why.")
        metrics = {step: manifest.metrics for step in good if (manifest := by_step[step].manifest)}
        best = best_steps(metrics, section.keep_best) if section.keep_best else []
        matter = {max(good), *best} - read
        if not matter:
            break
        read |= matter
        bad |= {step for step in matter if _is_bad(by_step[step], read_all=True)}
    going = removable_steps(
        good,
        keep_last=section.keep_last,
        newest_valid=max(good),
        keep_every_steps=section.keep_every_steps,
        keep_best=section.keep_best,
        metrics=metrics,
    )
    return [
        Verdict(entry, () if step in going else tuple(_reasons(step, section, good=good, best=best)))
        for step, entry in by_step.items()
    ]


def _reasons(step: int, section: CheckpointSection, *, good: Sequence[int], best: Sequence[int]) -> Iterator[str]:
    if step not in good:
        yield "bad, left alone"
        return
    if step == max(good):
        yield "newest good"
    elif step in sorted(good)[-section.keep_last :]:
        yield f"last {section.keep_last}"
    if section.keep_every_steps and step % section.keep_every_steps == 0:
        yield f"every {section.keep_every_steps}"
    if section.keep_best and step in best:
        yield f"best {section.keep_best.metric}"


def _is_bad(entry: CheckpointEntry, *, read_all: bool) -> bool:
    return bool(find_problems(entry, read_all=read_all)[0])
