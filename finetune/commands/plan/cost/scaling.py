"""The throughput per second and per dollar of numbers of GPUs, and the largest number that pays."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.commands.plan.cost.assumptions import MIN_EFFICIENCY


@dataclass(frozen=True)
class ScalePoint:
    """Throughput and price with this number of GPUs. `usd_per_gpu_hour` is None if no price is known."""

    num_gpus: int
    tokens_per_second: float
    usd_per_gpu_hour: float | None = None
    strategy: str = ""
    microbatch_size: int = 1

    @property
    def tokens_per_usd(self) -> float | None:
        """Return the tokens that a dollar pays for.

        >>> ScalePoint(8, 80_000.0, usd_per_gpu_hour=2.0).tokens_per_usd
        18000000.0
        """
        if not self.usd_per_gpu_hour:
            return None
        return self.tokens_per_second * 3600.0 / (self.num_gpus * self.usd_per_gpu_hour)


def efficiency(points: Sequence[ScalePoint]) -> list[float]:
    """Return the throughput per GPU of each point, as a share of that of the most efficient point.

    That is the point with the fewest GPUs, unless these need a slower strategy.

    >>> efficiency([ScalePoint(1, 100.0), ScalePoint(2, 180.0), ScalePoint(4, 300.0)])
    [1.0, 0.9, 0.75]
    """
    per_gpu = [point.tokens_per_second / point.num_gpus for point in points]
    return [one / max(per_gpu) for one in per_gpu]


def most_that_pay(points: Sequence[ScalePoint], *, least: float = MIN_EFFICIENCY) -> ScalePoint:
    """Return the point with the most GPUs whose efficiency is still at least `least`.

    >>> most_that_pay([ScalePoint(1, 100.0), ScalePoint(2, 180.0), ScalePoint(4, 250.0)]).num_gpus
    2
    """
    paying = [point for point, share in zip(points, efficiency(points), strict=True) if share >= least]
    return max(paying, key=lambda point: point.num_gpus)


def amdahl_share(points: Sequence[ScalePoint]) -> float | None:
    """Return the part of a step that does not get shorter with more GPUs, fitted to the first and the last point.

    Amdahl (1967): with a serial share s, n GPUs are 1 / (s + (1 - s) / n) times as fast as one. None for one point.

    >>> round(amdahl_share([ScalePoint(1, 100.0), ScalePoint(8, 100.0 / (0.1 + 0.9 / 8))]), 6)
    0.1
    """
    ordered = sorted(points, key=lambda point: point.num_gpus)
    if len(ordered) < 2:
        return None
    first, last = ordered[0], ordered[-1]
    ratio, speedup = last.num_gpus / first.num_gpus, last.tokens_per_second / first.tokens_per_second
    share = (1.0 / speedup - 1.0 / ratio) / (1.0 - 1.0 / ratio)
    return min(1.0, max(0.0, share))
