"""Published runs of one model on several numbers of GPUs, and what the model says of each.

Two errors: of the level, the modeled speed against the measured one, and of the change, the same relative to the first
number of GPUs of the series. Scaling is the change; the level is that of `finetune plan` (docs/how-to/planning.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from finetune.commands.plan.assumptions import STRAGGLER_NOISE
from finetune.commands.plan.hardware import parse_hardware
from finetune.commands.plan.step_time import StepTime, step_time

from scaling_model.models import Model

TOKENS, TFLOPS, RELATIVE = "tokens/s", "TFLOP/s", "of the first"


@dataclass(frozen=True)
class Point:
    """One number of GPUs: samples of a rank's microbatch, accumulated microbatches, and what was measured."""

    num_gpus: int
    samples: int
    microbatches: int
    measured: float  # of one GPU, in the unit of the series


@dataclass(frozen=True)
class Series:
    """Runs that differ in the number of GPUs, and where the source had it so in the microbatch."""

    source: str
    name: str
    model: Model
    gpu: str
    network_gbit: float  # of a machine
    strategy: str
    length: int
    recomputed: float  # 0: nothing, 1: every layer, 0.5: every second matrix product
    points: tuple[Point, ...]
    unit: str = TOKENS
    gradient_bytes: float = 2.0
    memory_bandwidth: float | None = None  # where the source's differs from the table's
    hsdp_shards: int | None = None
    is_counted: bool = True  # False: the source leaves open what the model has to know
    is_explained: bool = False  # far off for a reason that docs/proof/scaling.md gives

    @property
    def has_one_microbatch(self) -> bool:
        """Tell whether the runs differ in the number of GPUs alone."""
        return len({(each.samples, each.microbatches) for each in self.points}) == 1


@dataclass(frozen=True)
class Compared:
    """One measured point beside the model."""

    series: Series
    point: Point
    modeled: float
    time: StepTime
    change_error: float | None  # None for the first of its series

    @property
    def level_error(self) -> float | None:
        """Return how much faster the model is than the measurement; None where only changes were published."""
        return None if self.series.unit == RELATIVE else self.modeled / self.point.measured - 1


def compare(series: Series) -> list[Compared]:
    """Return each point of the series beside the model."""
    times = [_time(series, point) for point in series.points]
    speeds = [_speed(series, point, time.seconds) for point, time in zip(series.points, times, strict=True)]
    if series.unit == RELATIVE:
        speeds = [each / speeds[0] * series.points[0].measured for each in speeds]
    first = speeds[0] / series.points[0].measured
    return [
        Compared(series, point, speed, time, None if place == 0 else speed / point.measured / first - 1)
        for place, (point, speed, time) in enumerate(zip(series.points, speeds, times, strict=True))
    ]


def _time(series: Series, point: Point) -> StepTime:
    per_node = min(8, point.num_gpus)
    gpus = f"{per_node}x{series.gpu}"
    hardware = parse_hardware(gpus, num_nodes=point.num_gpus // per_node, network_gbit=series.network_gbit)
    device = hardware.device("bf16")
    if series.memory_bandwidth is not None:
        device = replace(device, memory_bandwidth=series.memory_bandwidth)
    work = series.model.work(
        *(series.length, point.samples, point.microbatches, series.recomputed), gradient_bytes=series.gradient_bytes
    )
    return step_time(series.strategy, work, device=device, cluster=hardware.cluster, hsdp_shards=series.hsdp_shards)


def _speed(series: Series, point: Point, seconds: float) -> float:
    """Return the speed of one GPU in the unit of the series; TFLOP/s count what is recomputed, as their sources do."""
    tokens = series.length * point.samples * point.microbatches / seconds
    if series.unit != TFLOPS:
        return tokens
    model = series.model
    flops = 6 * model.parameters + 12 * model.layers * model.hidden * series.length
    return tokens * flops * (1 + series.recomputed / 3) / 1e12


def fitted_noise(all_series: Sequence[Series]) -> float:
    """Return the STRAGGLER_NOISE, to a thousandth, with the least squares of the changes' errors."""
    compared = [compare(series) for series in all_series]
    return min((step / 1000 for step in range(101)), key=lambda noise: sum(_squares(each, noise) for each in compared))


def _squares(compared: Sequence[Compared], noise: float) -> float:
    """Return the squared errors of a series' changes if the noise were this; times are linear in it."""
    speeds = []
    for each in compared:
        other = each.time.seconds + (noise / STRAGGLER_NOISE - 1) * each.time.parts["stragglers"]
        speeds.append(each.modeled * each.time.seconds / other / each.point.measured)
    return sum((speed / speeds[0] - 1) ** 2 for speed in speeds[1:])
