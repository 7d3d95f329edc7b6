"""Which checkpoints may go."""

from collections.abc import Iterable, Mapping
from math import isfinite

from finetune.config.sections.checkpoint import KeepBestSection

NO_METRICS: Mapping[int, Mapping[str, float]] = {}


def removable_steps(
    steps: Iterable[int],
    *,
    keep_last: int,
    newest_valid: int,
    keep_every_steps: int | None = None,
    keep_best: KeepBestSection | None = None,
    metrics: Mapping[int, Mapping[str, float]] = NO_METRICS,
) -> list[int]:
    """Return the steps whose checkpoints may be deleted, oldest first; the newest valid one is never among them.

    The `keep_last` newest up to the newest valid one stay, and so do multiples of `keep_every_steps` and the best.
    Later ones are not judged: they are not this run's past.
    """
    past = sorted(step for step in steps if step <= newest_valid)
    staying = {newest_valid, *past[-keep_last:]}
    if keep_every_steps is not None:
        staying.update(step for step in past if step % keep_every_steps == 0)
    if keep_best is not None:
        staying.update(best_steps({step: metrics.get(step, {}) for step in past}, keep_best))
    return [step for step in past if step not in staying]


def best_steps(metrics: Mapping[int, Mapping[str, float]], wanted: KeepBestSection) -> list[int]:
    """Return the best steps by their metrics, the best first; of equals the later one.

    A checkpoint that was not evaluated at its very step, or whose metric is not finite, is no candidate.
    """
    sign = 1 if wanted.goal == "minimize" else -1
    values = {step: sign * found[wanted.metric] for step, found in metrics.items() if wanted.metric in found}
    candidates = [step for step, value in values.items() if isfinite(value)]
    return sorted(candidates, key=lambda step: (values[step], -step))[: wanted.count]
