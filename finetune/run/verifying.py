"""Prepared sets too large to be verified before they were used: how far that has come when training begins."""

from finetune.data.prepared.opening import mend
from finetune.data.prepared.store import PreparedSet
from finetune.run.lessons import Lessons

SECONDS_TO_WAIT = 10.0
"""For a large set; what is verified later is compared sample by sample, too, before a step learns from it."""


def mend_before_training(lessons: Lessons) -> None:
    """Have sets made again in which damage has been found by now; no collective: each rank sees to what it reads.

    Where something is worked out of all samples beforehand, all of them are verified first.
    """
    mend_sets(lessons, seconds=SECONDS_TO_WAIT if lessons.task.prior is None else None)


def mend_sets(lessons: Lessons, *, seconds: float | None = None) -> None:
    """Wait until all sets are verified, at most so long for each; those found to be damaged are made again."""
    for prepared in (*lessons.sources.values(), lessons.validation_set):
        if isinstance(prepared, PreparedSet):
            mend(prepared, seconds=seconds)
