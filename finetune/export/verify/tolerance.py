"""The maximum distance between the logits of an exported folder and those of the trained model.

The distance at a position is the norm of the difference relative to the norm of the logits. Rounding errors of layers
accumulate like a random walk, so the limit grows with the square root of the depth: `LIMITS[dtype] * sqrt(layers + 1)`.
In float32, the worst position is compared. In lower precision, where a mixture of experts may route a token to another
expert, the median is.

A deep model with large weights may amplify rounding errors further. If tensors, files and settings of the folder are
correct but the distance is above the limit, twice the distance between the folder's own logits in float32 and in the
lower precision is allowed.
"""

import math
from dataclasses import dataclass
from typing import Literal

Precision = Literal["float32", "tf32", "float16", "bfloat16"]

LIMITS: dict[Precision, float] = {"float32": 2e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 3e-2}
"""About 300 rounding errors in float32, since other devices sum in another order, and 16 in the others."""

_ORDER: tuple[Precision, ...] = ("float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class Tolerance:
    """The largest distance that rounding can explain."""

    limit: float
    is_median: bool
    rule: str
    dtype: str  # with the rounding of the lowest precision
    of: str  # the reference for messages


def tolerance(*precisions: Precision, num_layers: int, of: str) -> Tolerance:
    """Return the tolerance for the lowest of the precisions in which logits or weights were computed.

    >>> tolerance("float32", num_layers=3, of="the trained model").limit
    4e-05
    """
    worst = max(precisions, key=_ORDER.index)
    limit = LIMITS[worst] * math.sqrt(num_layers + 1)
    rule = f"{LIMITS[worst]:g} x sqrt(layers + 1) for {worst}"
    return Tolerance(limit, worst != "float32", rule, "float16" if worst == "tf32" else worst, of)
