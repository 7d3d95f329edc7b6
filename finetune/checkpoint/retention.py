"""Which checkpoints may go."""

from collections.abc import Iterable


def removable_steps(steps: Iterable[int], *, keep_last: int, newest_valid: int) -> list[int]:
    """Return the steps whose checkpoints may be deleted, oldest first; the newest valid one is never among them.

    The `keep_last` newest up to the newest valid one stay. Later ones are not judged: they are not this run's past.
    """
    past = sorted(step for step in steps if step <= newest_valid)
    return [step for step in past[: max(0, len(past) - keep_last)] if step != newest_valid]
