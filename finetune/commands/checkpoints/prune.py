"""`finetune checkpoint prune`: shows which checkpoints the retention settings would delete, and deletes them."""

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
from finetune.runtime.run_folder import lock_run_folder

GOALS = ("minimize", "maximize")


@dataclass(frozen=True)
class Verdict:
    """Whether a checkpoint is kept, and why."""

    entry: CheckpointEntry
    reasons: tuple[str, ...]  # to keep it; empty if it is deleted

    @property
    def is_deleted(self) -> bool:
        """Return whether the checkpoint will be deleted."""
        return not self.reasons


def prune(
    run: Path, *, keep_last: int | None, keep_every: int | None, keep_best: str | None, does_delete: bool
) -> None:
    """Print which checkpoints are kept and why, and delete the others if `does_delete`.

    Options default to the run's own settings. The newest good checkpoint is always kept, and bad ones are not deleted.
    Interrupted deletions are completed. Raises UserError while a run is writing to the folder, CheckpointError if no
    checkpoint is good or one could not be deleted.
    """
    location = locate_run(run)
    if location.chosen is not None:
        raise UserError(f"{run} is a single checkpoint. Pass the folder of the run to prune.")
    given = {
        "keep_last": keep_last,
        "keep_every_steps": keep_every,
        "keep_best": parse_keep_best(keep_best) if keep_best is not None else None,
    }
    section = retention_of(location.run).model_copy(
        update={name: value for name, value in given.items() if value is not None}
    )
    with lock_run_folder(location.run, log=print) if does_delete else nullcontext():
        verdicts = decide(read_entries(location.checkpoints), section)
        rows = [(verdict.entry, verdict.reasons) for verdict in verdicts]
        print_table(prune_table(rows, now=time.time(), width=width()))
        deleted = [verdict.entry for verdict in verdicts if verdict.is_deleted]
        size = format_size(sum(entry.manifest.size_bytes for entry in deleted if entry.manifest))
        if does_delete and (failures := delete_checkpoints(location.checkpoints, [entry.step for entry in deleted])):
            raise CheckpointError("\n".join(failures))
    if not deleted:
        print("nothing to delete")
    elif does_delete:
        print(f"deleted {len(deleted)}, {size}")
    else:
        print(f"{len(deleted)} would be deleted, {size}. Add `--yes` to delete them.")


def retention_of(run: Path) -> CheckpointSection:
    """Return the run's own checkpoint settings, or the defaults if its folder has none."""
    if (run / RESOLVED_NAME).is_file():
        return load_resolved(run).config.checkpoint
    print(f"{run / RESOLVED_NAME} does not exist: options default to the checkpoint section's defaults")
    return CheckpointSection()


def parse_keep_best(value: str) -> KeepBestSection:
    """Parse `METRIC[:minimize|maximize][:COUNT]`; raises UserError for anything else.

    >>> parse_keep_best("exact_match:maximize:3").count
    3
    """
    metric, *rest = value.split(":")
    goal = rest.pop(0) if rest and rest[0] in GOALS else "minimize"
    count = rest.pop(0) if rest else "1"
    if not metric or rest or not count.isdigit() or int(count) == 0:
        raise UserError(
            f"--keep-best {value}: write a metric, such as `loss`, `loss:2` for the two best, or "
            "`exact_match:maximize`."
        )
    return KeepBestSection.model_validate({"metric": metric, "goal": goal, "count": int(count)})


def decide(entries: Sequence[CheckpointEntry], section: CheckpointSection) -> list[Verdict]:
    """Return for each checkpoint whether it is kept and why; raises CheckpointError if none is good.

    The newest and the best are read and hashed; a bad one is replaced by the next.
    """
    bad = {entry.step for entry in entries if _is_bad(entry, read_all=False)}
    by_step = {entry.step: entry for entry in entries}
    read: set[int] = set()
    while True:
        good = [step for step in by_step if step not in bad]
        if not good:
            raise CheckpointError(
                "All checkpoints are bad, so none is deleted. `finetune checkpoint verify` shows the problems."
            )
        metrics = {step: manifest.metrics for step in good if (manifest := by_step[step].manifest)}
        best = best_steps(metrics, section.keep_best) if section.keep_best else []
        required = {max(good), *best} - read
        if not required:
            break
        read |= required
        bad |= {step for step in required if _is_bad(by_step[step], read_all=True)}
    deleted = removable_steps(
        good,
        keep_last=section.keep_last,
        newest_valid=max(good),
        keep_every_steps=section.keep_every_steps,
        keep_best=section.keep_best,
        metrics=metrics,
    )
    return [
        Verdict(entry, () if step in deleted else tuple(_reasons(step, section, good=good, best=best)))
        for step, entry in by_step.items()
    ]


def _reasons(step: int, section: CheckpointSection, *, good: Sequence[int], best: Sequence[int]) -> Iterator[str]:
    if step not in good:
        yield "bad, not deleted"
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
