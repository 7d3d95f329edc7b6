"""How far the logits of an exported folder may be from those of the trained model.

A position's distance is the norm of the difference as a part of the logits' own size. Rounding errors of layers add up
like random steps, so the limit grows with the square root of the depth: `LIMITS[dtype] * sqrt(layers + 1)`. In float32
the worst position counts. With fewer bits a mixture of experts may send a token to another expert: the median counts.

A deep model with large weights may amplify roundings further. Where tensors, files and settings of the folder are right
and the logits are too far nevertheless, twice the distance between the folder's own logits in float32 and in the lower
precision is allowed.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["float32", "tf32", "float16", "bfloat16"]

LIMITS: dict[Precision, float] = {"float32": 2e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 3e-2}
"""About 300 roundings in float32, whose sums are taken in other orders on another device, and 16 in the others."""

_ORDER: tuple[Precision, ...] = ("float32", "tf32", "float16", "bfloat16")


@dataclass(frozen=True)
class Tolerance:
    """The largest distance that rounding explains."""

    limit: float
    is_median: bool
    rule: str
    dtype: str  # that rounds as the least precise does
    of: str  # with what the folder is compared

    def as_json(self) -> dict[str, Any]:
        """Return it as the program reads it."""
        return vars(self)


def tolerance(*precisions: Precision, num_layers: int, of: str) -> Tolerance:
    """Return the tolerance of the least precise of what the logits, or the weights, were computed in.

    >>> tolerance("float32", num_layers=3, of="the trained model").limit
    4e-05
    """
    worst = max(precisions, key=_ORDER.index)
    limit = LIMITS[worst] * math.sqrt(num_layers + 1)
    rule = f"{LIMITS[worst]:g} x sqrt(layers + 1) for {worst}"
    return Tolerance(limit, worst != "float32", rule, "float16" if worst == "tf32" else worst, of)
